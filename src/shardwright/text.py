r"""Text for people: foreign text made safe to show, columns, lines folded to a terminal's width.

A terminal obeys some characters instead of showing them: an escape sequence clears the screen or sets its
title, a line break adds a line that looks like ours, a direction mark makes a name read backwards. Here they
become their JSON escapes, such as ``\u001b``; so JSON that passes through stays JSON.

::

    model      layers  from                              model      layers  from
    llama3-8b  32      Llama team 2024, arXiv:240|       llama3-8b  32      Llama team 2024,
    7.21783                                      |                          arXiv:2407.21783
"""

import re
import reprlib
import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
# Of those that only format, such as the joiners of emoji, these change the order in which a line is read.
_DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_COLOURS = re.compile(r"\x1b\[[0-9;]{0,16}m")
_ABBREVIATION = reprlib.Repr()
_ABBREVIATION.maxstring = _ABBREVIATION.maxother = 120


def shortened(names: Sequence[str], *, most: int = 3) -> str:
    """Some of many names.

    >>> shortened(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


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


def align(rows: Sequence[Sequence[str]]) -> str:
    """Lays out rows of text in columns, whatever names are among it.

    >>> print(align([["rank", "memory"], ["0", "1.5 GiB"]]))
    rank  memory
    0     1.5 GiB
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


_GAP = re.compile(r"\S {2,}(?=\S)")
_COMMAND = re.compile(r"(?<=: )shardwright .*$|^ *export .*$")
_QUANTITY = re.compile(
    r"(?<=\d) (?=(?:s|ms|us|ns|min|h|[KMGT]?i?B|[kKMGT]|tok/s|samples/s|billion|million)\b)"
)
_HANGING = 2
_FIELD = 40
"""Letters; longer fields between bars are folded as sentences are."""
_BETWEEN = 2
_NO_BREAK = "\N{NO-BREAK SPACE}"


def folded(text: str, width: int) -> str:
    """The text in lines of a width, as far as its words allow.

    Columns of a table become as narrow as their words, the widest first. Where that is not enough, a row goes
    on in the next line, under the last column that is far enough to the left. A paragraph continues two
    characters to the right of its begin; fields between bars stay whole. A command at the end of a line stays
    in one piece, so that it can be copied; so does a number with its unit.

    >>> print(folded("rank  why\\n0     it has the head, and the embedding", 24))
    rank  why
    0     it has the head,
          and the embedding
    """
    lines: list[str] = []
    for is_row, group in groupby(text.split("\n"), key=lambda line: _GAP.search(line.lstrip()) is not None):
        block = list(group)
        if max(map(len, block)) > width:
            table = _narrowed(block, width) if is_row else None
            block = table or [folded for line in block for folded in _folded_line(line, width)]
        lines += block
    return "\n".join(lines)


def cut(line: str, width: int) -> str:
    """As much of a line as fits: whole fields between bars, or letters where it has no bars.

    >>> cut("step 120 | loss 3.2145 | 41.2k tok/s", 30)
    'step 120 | loss 3.2145'
    """
    if len(line) <= width:
        return line
    at = line.rfind(" | ", 0, width + len(" | "))
    return line[: at if at > 0 else width]


def _narrowed(rows: Sequence[str], width: int) -> list[str] | None:
    """Rows of one table with narrower columns; None where its words are too wide."""
    begins = _columns(rows)
    indent = begins[0]
    cells = [
        [_kept(row[begin:end].strip()) for begin, end in zip(begins, [*begins[1:], None], strict=True)]
        for row in rows
    ]
    columns = list(zip(*cells, strict=True))
    least = [max(len(word) for cell in column for word in cell.split(" ")) for column in columns]
    widths = [max(map(len, column)) for column in columns]
    room = width - indent - _BETWEEN * (len(columns) - 1)
    if sum(least) > room:
        return None
    while sum(widths) > room:
        widest = max(
            (number for number, size in enumerate(widths) if size > least[number]), key=widths.__getitem__
        )
        widths[widest] -= 1
    return [line for row in cells for line in _laid_out(row, widths, indent)]


def _columns(rows: Sequence[str]) -> list[int]:
    """Where columns begin: behind two characters or more that are blank in every row."""
    length = max(map(len, rows))
    blank = [all(row[place : place + 1] in ("", " ") for row in rows) for place in range(length)]
    first = blank.index(False)
    return [
        first,
        *(place for place in range(first + 2, length) if blank[place - 2 : place + 1] == [True, True, False]),
    ]


def _laid_out(row: Sequence[str], widths: Sequence[int], indent: int) -> Iterator[str]:
    wrapped = [_wrapped(cell, size) for cell, size in zip(row, widths, strict=True)]
    for number in range(max(map(len, wrapped))):
        line = (" " * _BETWEEN).join(
            (cell[number] if number < len(cell) else "").ljust(size)
            for cell, size in zip(wrapped, widths, strict=True)
        )
        yield f"{' ' * indent}{line.rstrip()}".replace(_NO_BREAK, " ")


def _folded_line(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    indent = len(line) - len(line.lstrip())
    columns = [found.end() for found in _GAP.finditer(line, indent) if found.end() <= width * 2 // 3]
    hanging = columns[-1] if columns else indent + _HANGING
    kept = _COMMAND.sub(lambda found: found[0].replace(" ", _NO_BREAK), _kept(line))
    return [part.replace(_NO_BREAK, " ") for part in _wrapped(kept, width, hanging=hanging)]


def _kept(text: str) -> str:
    """The text with what stays together glued: quantities, and short fields with the bar behind them."""
    *fields, last = _QUANTITY.sub(_NO_BREAK, text).split(" | ")
    parts = [
        f"{field.replace(' ', _NO_BREAK) if len(field) < _FIELD else field}{_NO_BREAK}|" for field in fields
    ]
    return " ".join([*parts, last.replace(" ", _NO_BREAK) if fields and len(last) < _FIELD else last])


def _wrapped(text: str, width: int, *, hanging: int = 0) -> list[str]:
    return textwrap.wrap(
        text, width, subsequent_indent=" " * hanging, break_long_words=False, break_on_hyphens=False
    ) or [""]
