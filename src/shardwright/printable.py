"""Makes foreign text safe to show: names from files, folders or a script, on a console or a page.

A terminal obeys some characters instead of showing them: an escape sequence clears the screen or sets its
title, a line break adds a line that looks like ours, a direction mark makes a name read backwards. Here they
become their JSON escapes, such as ``\\u001b``; so JSON that passes through stays JSON.
"""

import re
import reprlib
import unicodedata
from typing import Any

__all__ = ["control_in", "printable", "shown"]

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
# Of those that only format, such as the joiners of emoji, these change the order in which a line is read.
_DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_COLOURS = re.compile(r"\x1b\[[0-9;]{0,16}m")
_ABBREVIATION = reprlib.Repr()
_ABBREVIATION.maxstring = _ABBREVIATION.maxother = 120


def printable(text: str, *, lines: bool = False) -> str:
    """A text that a terminal shows and does not obey.

    >>> printable("run\\x1b[2J\\n")
    'run\\\\u001b[2J\\\\u000a'
    >>> printable("\\x1b[1mgan.py:28\\x1b[0m: no", lines=True)
    'gan.py:28: no'
    """
    if text.isprintable():
        return text
    kept = ""
    if lines:
        kept, text = "\n\t", _COLOURS.sub("", text)
    return "".join(_escaped(each) if _is_hidden(each) and each not in kept else each for each in text)


def control_in(name: str) -> str | None:
    """The first character of a name that names do not have, escaped; None where there is none.

    >>> control_in("first-try") is None, control_in("first\\ntry")
    (True, '\\\\u000a')
    """
    if name.isprintable():
        return None
    refused = (each for each in name if unicodedata.category(each) in _HIDDEN - {"Cf"} or each in _DIRECTIONS)
    found = next(refused, None)
    return None if found is None else _escaped(found)


def shown(value: Any) -> str:
    """A value as messages have it: abbreviated where it is long or deep.

    >>> shown("a\\x1b"), shown(10**5000)
    ("'a\\\\x1b'", 'a whole number of more than 4300 digits')
    """
    try:
        return _ABBREVIATION.repr(value)
    except ValueError:  # of a number that Python refuses to write
        return "a whole number of more than 4300 digits"


def _is_hidden(character: str) -> bool:
    return unicodedata.category(character) in _HIDDEN


def _escaped(character: str) -> str:
    number = ord(character)
    if number < 0x10000:
        return f"\\u{number:04x}"
    number -= 0x10000
    return f"\\u{0xD800 + (number >> 10):04x}\\u{0xDC00 + (number & 0x3FF):04x}"
