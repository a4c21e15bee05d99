"""Hides values that may be secrets from what people pass on: reports, and the block of `doctor`."""

import re

__all__ = ["HIDDEN", "may_be_secret", "without_secrets"]

HIDDEN = "(not shown)"
"""Stands in the place of a value."""

_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
# `--hub-token abc`, `--hub_token=abc`, `TOKEN=abc`; the value may be in quotes.
_VALUE = re.compile(r"(?<!\S)(?P<name>-*[A-Za-z][\w-]*)(?P<between>=|\s+)(?P<value>'[^']*'|\"[^\"]*\"|\S+)")


def may_be_secret(name: str) -> bool:
    """Whether the value of an option or a variable of this name may be one.

    >>> may_be_secret("WANDB_API_KEY"), may_be_secret("--seed")
    (True, False)
    """
    return any(word in name.upper() for word in _WORDS)


def without_secrets(command: str) -> str:
    """A command line without the values of options whose names tell of secrets.

    >>> without_secrets("train.py --hub-token abc --seed 1 --api_key='a b'")
    'train.py --hub-token (not shown) --seed 1 --api_key=(not shown)'
    """
    parts, end = [], 0
    while (found := _VALUE.search(command, end)) is not None:
        hides = may_be_secret(found["name"]) and (found["between"] == "=" or found["name"].startswith("-"))
        # Of other words the next may be a name itself.
        next_end = found.end() if hides else found.end("name")
        parts.append(command[end : found.start("value")] + HIDDEN if hides else command[end:next_end])
        end = next_end
    return "".join([*parts, command[end:]])
