"""Runs the command line in this process."""

import io

import pytest

from shardwright.cli import main


def call(capsys, *words):
    """Returns exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code or 0, *capsys.readouterr()


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True
