"""Of an error that all ranks have, the first prints the traceback, and the others a line."""

import sys

import pytest

from shardwright.errors import ConfigError
from shardwright.run.joining import be_brief


@pytest.fixture(autouse=True)
def _hook(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(sys, "argv", [__file__])
    monkeypatch.delenv("SHARDWRIGHT_RUN_DIR", raising=False)


def printed(error, capsys):
    try:
        raise error
    except type(error):
        sys.excepthook(*sys.exc_info())
    return capsys.readouterr().err


def test_another_rank_prints_a_line(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    be_brief()
    (line,) = printed(ConfigError("microbatches is 0"), capsys).splitlines()
    assert line.startswith("[rank 1] test_brief_errors.py:")
    assert line.endswith(": ConfigError: microbatches is 0")
    assert "Traceback" in printed(ValueError("of the script"), capsys)


def test_an_error_with_a_cause_is_printed_with_it(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    be_brief()
    error = ConfigError("cannot be read")
    error.__cause__ = OSError("disk")
    assert "OSError: disk" in printed(error, capsys)


@pytest.mark.parametrize("variables", [{"RANK": "0"}, {"RANK": "1", "SHARDWRIGHT_RUN_DIR": "runs/a"}])
def test_the_first_rank_and_those_of_our_launcher_print_all(monkeypatch, capsys, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    be_brief()
    assert "Traceback" in printed(ConfigError("microbatches is 0"), capsys)
