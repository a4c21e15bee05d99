"""Text that a process can have among its words and variables: what the kernel, and UTF-8, can hold."""

import os
from collections.abc import Mapping

from shardwright.errors import ConfigError

__all__ = ["check_process", "check_variables", "refuse_half_characters", "why_no_name", "why_no_text"]

_NUL = "it has a NUL character, at which text of a process ends"
_SURROGATE = "it has half a character of Unicode (a lone surrogate), which UTF-8 cannot express"


def why_no_text(text: str) -> str | None:
    """Why no process can get a text; None where it can.

    >>> why_no_text("it's 5 $") is None
    True
    >>> why_no_text("a\\0b")
    'it has a NUL character, at which text of a process ends'
    """
    if "\0" in text:
        return _NUL
    try:
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATE
    return None


def why_no_name(name: str) -> str | None:
    """Why no variable can have a name; None where it can.

    >>> why_no_name("a=b")
    "it has '=', with which the value of a variable begins"
    """
    if not name:
        return "it is empty"
    if "=" in name:
        return "it has '=', with which the value of a variable begins"
    return why_no_text(name)


def check_variables(given: Mapping[str, str], *, what: str) -> None:
    """Checks variables that a user has given.

    Args:
        given: values by name.
        what: where they were given.

    Raises:
        ConfigError: a process cannot have one of them.
    """
    for name, value in given.items():
        if (reason := why_no_name(name)) is not None:
            raise ConfigError(f"{what} has a variable {name!r}, but {reason}. Give it another name.")
        if (reason := why_no_text(value)) is not None:
            raise ConfigError(f"{name} in {what} is {value!r}, but {reason}. Give another value.")


def check_process(words: list[str], variables: Mapping[str, str]) -> None:
    """Checks all that a process would get, paths included, which need not be UTF-8 on this machine.

    Raises:
        ConfigError: it cannot get all of it.
    """
    for what, text in (*(("a word of the script", word) for word in words), *variables.items()):
        if "\0" in text or not _has_bytes(text):
            reason = why_no_text(text)
            raise ConfigError(f"{what} would be {text!r}, but {reason}. Give it another value, or rename it.")


def refuse_half_characters(manifest: str) -> None:
    """Refuses what a job is submitted as where its folders have names that are not UTF-8.

    Raises:
        ConfigError: one has.
    """
    if why_no_text(manifest) is not None:
        raise ConfigError(
            "a folder or file of this job has a name that is not UTF-8, so that no manifest can have it. "
            "Rename it, or run the job on this machine."
        )


def _has_bytes(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True
