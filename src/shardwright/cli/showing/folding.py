"""Folds lines that are longer than a terminal is wide: between words, and under what they belong to.

::

    model      layers  from                              model      layers  from
    llama3-8b  32      Llama team 2024, arXiv:240|       llama3-8b  32      Llama team 2024,
    7.21783                                      |                          arXiv:2407.21783
"""

import re
import textwrap

__all__ = ["folded"]

_GAP = re.compile(r"\S {2,}(?=\S)")
_COMMAND = re.compile(r"(?<=: )shardwright .*$")
_QUANTITY = re.compile(r"(?<=\d) (?=(?:s|ms|us|ns|min|h|[KMGT]?i?B|[kKMGT]|tok/s|samples/s)\b)")
_HANGING = 2
_NO_BREAK = "\N{NO-BREAK SPACE}"


def folded(text: str, width: int) -> str:
    """The text in lines of a width, as far as its words allow.

    The last column of a table continues under itself, a paragraph two characters to the right of its begin. A
    command at the end of a line stays in one piece, so that it can be copied; so does a number with its unit.

    >>> print(folded("rank  why\\n0     it has the head, and the embedding", 24))
    rank  why
    0     it has the head,
          and the embedding
    """
    return "\n".join(_folded_line(line, width) for line in text.split("\n"))


def _folded_line(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    indent = len(line) - len(line.lstrip())
    columns = [found.end() for found in _GAP.finditer(line, indent) if found.end() <= width * 2 // 3]
    kept = _COMMAND.sub(lambda found: found[0].replace(" ", _NO_BREAK), _QUANTITY.sub(_NO_BREAK, line))
    lines = textwrap.wrap(
        kept,
        width,
        subsequent_indent=" " * (columns[-1] if columns else indent + _HANGING),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace(_NO_BREAK, " ")
