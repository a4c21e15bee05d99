"""Runs a scheduler's programs, with checks."""

import subprocess
from collections.abc import Mapping, Sequence

from shardwright.errors import LaunchError

__all__ = ["ask", "run"]

_TIMEOUT_S = 120.0


def run(
    words: Sequence[str], *, remedy: str, text: str | None = None, environ: Mapping[str, str] | None = None
) -> str:
    """The output of a program."""
    try:
        done = subprocess.run(
            words,
            input=text,
            env=None if environ is None else dict(environ),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except FileNotFoundError:
        raise LaunchError(f"there is no program {words[0]} on the PATH. {remedy}") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{' '.join(words)} did not answer within {_TIMEOUT_S:g} s.") from None
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or "it says nothing"
        raise LaunchError(f"{' '.join(words)} failed with exit code {done.returncode}: {said}")
    return done.stdout


def ask(words: Sequence[str]) -> str | None:
    """The output of a program; None if it fails or does not exist."""
    try:
        return run(words, remedy="")
    except LaunchError:
        return None
