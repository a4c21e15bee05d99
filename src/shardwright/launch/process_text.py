"""Checks text and counts that a process is started with: what the kernel and UTF-8 can carry."""

import os
import warnings
from collections.abc import Mapping
from typing import Any

from shardwright.errors import ConfigError
from shardwright.quantities import MOST_RANKS_OF_HOST
from shardwright.text import control_in, shown

__all__ = [
    "check_count",
    "check_process",
    "check_processes",
    "check_variables",
    "refuse_half_characters",
    "shown",
    "why_no_name",
    "why_no_text",
    "why_no_variable",
    "without_too_long",
]

_NUL = "it has a NUL character, at which text of a process ends"
_SURROGATE = "it has half a character of Unicode (a lone surrogate), which UTF-8 cannot express"
# Linux: MAX_ARG_STRLEN, 32 pages, of which the NUL at the end takes one byte.
_MOST_BYTES = 32 * 4096 - 1


def why_no_text(text: str) -> str | None:
    """Why no process can get a text as one of its words; None where it can.

    >>> why_no_text("it's 5 $") is None
    True
    >>> why_no_text("a\\0b")
    'it has a NUL character, at which text of a process ends'
    """
    return _NUL if "\0" in text else _why_no_utf8(text) or _why_too_long(text)


def why_no_variable(name: str, value: str) -> str | None:
    """Why no process can get a value as that of a variable; None where it can."""
    return why_no_text(value) or _why_too_long(f"{name}={value}")


def without_too_long(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables that a process can have; others are left out, with a warning."""
    kept = {name: value for name, value in variables.items() if _why_too_long(f"{name}={value}") is None}
    if left := sorted(variables.keys() - kept.keys()):
        warnings.warn(
            f"{', '.join(left)} {'are' if len(left) > 1 else 'is'} not set: Linux gives a process at most "
            f"{_MOST_BYTES:,} bytes in one variable. The script gets its words all the same.",
            stacklevel=2,
        )
    return kept


def why_no_name(name: str) -> str | None:
    """Why no variable can have a name; None where it can.

    >>> why_no_name("a=b")
    "it has '=', with which the value of a variable begins"
    """
    if not name:
        return "it is empty"
    if "=" in name:
        return "it has '=', with which the value of a variable begins"
    if (reason := why_no_text(name)) is not None:
        return reason
    control = control_in(name)
    return None if control is None else f"it has a control character, {control}"


def check_variables(given: Mapping[str, str], *, what: str) -> None:
    """Checks variables that a user has given."""
    for name, value in given.items():
        if (reason := why_no_name(name)) is not None:
            raise ConfigError(f"{what} has a variable {shown(name)}, but {reason}. Give it another name.")
        if (reason := why_no_variable(name, value)) is not None:
            raise ConfigError(f"{name} in {what} is {shown(value)}, but {reason}. Give another value.")


def check_process(words: list[str], variables: Mapping[str, str]) -> None:
    """Checks all that a process would get, paths included, which need not be UTF-8 on this machine."""
    entries = [("a word of the script", word, word) for word in words]
    entries += [(name, value, f"{name}={value}") for name, value in variables.items()]
    for what, text, entry in entries:
        if "\0" in text or not _has_bytes(text):
            reason = why_no_text(text)
            raise ConfigError(f"{what} would be {text!r}, but {reason}. Give it another value, or rename it.")
        if (reason := _why_too_long(entry)) is not None:
            raise ConfigError(
                f"{what} would be {shown(text)}, but {reason}. SM_HPS and SM_TRAINING_ENV have all "
                "hyperparameters together, SM_USER_ARGS all words."
            )


def refuse_half_characters(manifest: str) -> None:
    """Refuses what a job is submitted as where its folders have names that are not UTF-8."""
    if _why_no_utf8(manifest) is not None:
        raise ConfigError(
            "a folder or file of this job has a name that is not UTF-8, so that no manifest can have it. "
            "Rename it, or run the job on this machine."
        )


def _why_no_utf8(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATE
    return None


def _why_too_long(entry: str) -> str | None:
    num_bytes = len(os.fsencode(entry))
    if num_bytes <= _MOST_BYTES:
        return None
    return (
        f"it takes {num_bytes:,} bytes, and Linux gives a process at most {_MOST_BYTES:,} in one word or "
        "variable. Put what is long in a file, in a channel for example, and give its path"
    )


def _has_bytes(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def check_count(name: str, value: Any, *, most: int, least: int = 1) -> int:
    """A whole number in its range."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name} is {shown(value)}, but it must be a whole number from {least} to {most}.")
    return value


def check_processes(value: Any) -> int:
    """Checks the number of ranks on a host; raises as `check_count`."""
    return check_count("processes_per_host", value, most=MOST_RANKS_OF_HOST)
