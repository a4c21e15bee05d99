"""Command lines for a shell that fills in the rest, which only it knows."""

import re
import shlex
from collections.abc import Iterable

__all__ = ["ShellText", "is_variable", "shell_line"]

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class ShellText(str):
    """Text that a shell is to read, such as ``"$SLURM_NODEID"``, where other words are taken as they are."""

    __slots__ = ()


def shell_line(words: Iterable[str]) -> str:
    """The words of a command for a shell.

    >>> shell_line(["run", "--node-rank", ShellText('"$1"'), "it's $HOME"])
    'run --node-rank "$1" \\'it\\'"\\'"\\'s $HOME\\''
    """
    return " ".join(word if isinstance(word, ShellText) else shlex.quote(word) for word in words)


def is_variable(name: str) -> bool:
    """Whether a shell can have a variable of this name; ``SM_HP_LEARNING-RATE`` is none."""
    return _VARIABLE.fullmatch(name) is not None
