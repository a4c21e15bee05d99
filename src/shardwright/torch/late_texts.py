"""Texts with numbers that are not known yet: a placeholder stands in them until the step is over.

::

    f"loss {loss.item():.3f}"          "loss <><><><>": characters for private use
    return the text                    "loss 1.234": filled in when the step returns
    print it in the step               "loss (known after the step)": what a person can read

A placeholder has no character that a text has otherwise, so that each piece of it shows itself, and none has
an upper or a lower case. What was cut is refused, instead of a wrong text.
"""

import io
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from itertools import count
from pathlib import PurePath
from typing import Any, Protocol

from shardwright.errors import DeferredReadError
from shardwright.torch.source_line import user_line

__all__ = ["LateText", "filled_in", "forget_old_texts", "is_marked"]

# At the end of all characters, where hardly anybody has an icon: 16 digits, and what is around them.
_FIRST = 0x10FA00
_DIGITS = "".join(chr(_FIRST + digit) for digit in range(16))
_BEGIN, _END = chr(_FIRST + 16), chr(_FIRST + 17)
_PLACEHOLDER = re.compile(f"{_BEGIN}([{_DIGITS}]+){_END}")
# The same characters as repr() of a text that holds them writes them, and json.dumps().
_ESCAPED = re.compile(r"(?i:\\U0010fa([01][0-9a-f])|\\udbfe\\ude([01][0-9a-f]))")
_PIECES = re.compile(f"[{_DIGITS}{_BEGIN}{_END}]+")
_MARK = re.compile(f"{_PIECES.pattern}|{_ESCAPED.pattern}")
_MARK_IN_BYTES = re.compile(rb"\xf4\x8f\xa8[\x80-\x91]|" + _ESCAPED.pattern.encode())
_READABLE = "(known after the step)"
_MOST_OLD = 1000

_numbers = count()
_texts: "dict[int, LateText]" = {}


class _Late(Protocol):
    """What is known later: a `LateValue`, or a text of one."""

    @property
    def is_known(self) -> bool: ...

    @property
    def known(self) -> Any: ...


class LateText(str):
    """A text of one late value.

    It may be put into other texts. What other texts are made of it is known later, too; else nobody can look
    at it. When the value is known, it does what the text does.

    Args:
        value: what it is made of.
        write: makes the text.
    """

    _value: _Late
    _write: Callable[[Any], str]
    _line: str

    def __new__(cls, value: _Late, write: Callable[[Any], str]) -> "LateText":
        """Gets a placeholder of its own."""
        number = next(_numbers)
        digits = "".join(_DIGITS[int(digit, 16)] for digit in f"{number:x}")
        text = super().__new__(cls, _BEGIN + digits + _END)
        text._value, text._write, text._line = value, write, user_line()
        _texts[number] = text
        for stream in (sys.stdout, sys.stderr):
            _show_readable(stream)
        return text

    @property
    def is_known(self) -> bool:
        """Whether it can be written."""
        return self._value.is_known

    @property
    def known(self) -> str:
        """The text.

        Raises:
            DeferredReadError: the step is not over.
        """
        value = self._value.known
        try:
            return self._write(value)
        except Exception as error:
            if not hasattr(error, "__notes__"):
                error.add_note(f"This was to be written at {self._line}, in a step function.")
            raise

    def _later(self, write: Callable[[str], str]) -> str:
        return write(self.known) if self.is_known else LateText(self, write)

    def __str__(self) -> str:
        return self.known if self.is_known else self

    def __repr__(self) -> str:
        return self._later(repr)

    def __format__(self, format_spec: str) -> str:
        return self._later(lambda text: format(text, format_spec)) if format_spec else str(self)

    def __float__(self) -> float:
        return float(self.known)

    def __int__(self) -> int:
        return int(self.known)

    def __copy__(self) -> "LateText":
        return self

    def __deepcopy__(self, memo: Any) -> "LateText":
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files have the text."""
        return str, (self.known,)

    __hash__ = str.__hash__  # it may be a key of what the step returns


def _make_method(name: str, *, is_text: bool) -> Any:
    """What a method of `LateText` does: the same to the text, now or later."""

    @wraps(getattr(str, name))
    def method(self: LateText, *args: Any, **kwargs: Any) -> Any:
        def on(text: str) -> Any:
            plain = [arg.known if isinstance(arg, LateText) else arg for arg in args]
            return getattr(text, name)(*plain, **kwargs)

        return self._later(on) if is_text else on(self.known)

    return method


def _define_methods() -> None:
    """Gives `LateText` all methods of texts but those that make a longer one."""
    texts = (
        "__getitem__ capitalize casefold center expandtabs ljust lower lstrip removeprefix removesuffix "
        "replace rjust rstrip strip swapcase title translate upper zfill"
    ).split()
    looks = "contains eq ge gt iter le len lt mod ne".split()
    others = [name for name in dir(str) if "__" not in name] + [f"__{name}__" for name in looks]
    for name in (*texts, *others):
        setattr(LateText, name, _make_method(name, is_text=name in texts))


_define_methods()


def is_marked(item: Any) -> bool:
    """Whether a text, a path, or bytes, have a piece of a placeholder."""
    if isinstance(item, str):
        return _MARK.search(item) is not None
    if isinstance(item, bytes | bytearray):
        return _MARK_IN_BYTES.search(item) is not None
    return isinstance(item, PurePath) and _MARK.search(str(item)) is not None


def filled_in(item: str | bytes | bytearray | PurePath) -> str:
    """What a text with placeholders is now.

    Args:
        item: it `is_marked`.

    Raises:
        DeferredReadError: it has something that is not known or was cut, or it is no text.
    """
    text = _with_known(item, lambda late: late.known) if isinstance(item, str) else None
    if text is None or _MARK.search(text):
        what = f"the text {_readable(item)[:100]!r}" if isinstance(item, str) else f"{type(item).__name__}"
        raise DeferredReadError(
            f"the step function returns {what}, made of the text of a number that was not known when it was "
            "cut, changed, or made into something else. Return the number, and make of it what you need when "
            "the step has returned."
        )
    return text


def forget_old_texts() -> None:
    """Keeps the last ones: others that are returned or printed later are not filled in."""
    for number in list(_texts)[:-_MOST_OLD]:
        del _texts[number]


def _with_known(text: str, know: Callable[[LateText], str]) -> str:
    def now(found: re.Match[str]) -> str:
        number = int("".join(f"{_DIGITS.index(digit):x}" for digit in found[1]), 16)
        return know(_texts[number]) if number in _texts else found[0]

    # As plain texts: of a LateText, functions of `re` would ask for what is not known.
    plain = _ESCAPED.sub(lambda found: chr(_FIRST + int(found[1] or found[2], 16)), "".join((text, "")))
    return _PLACEHOLDER.sub(now, plain)


def _readable(text: str) -> str:
    """For a person: what is not known is said to be known later."""

    def now(late: LateText) -> str:
        try:
            return late.known
        except Exception:
            return _READABLE

    return _PIECES.sub(_READABLE, _with_known(text, now))


def _show_readable(stream: Any) -> None:
    """Has a terminal show what a person can read, from now on; others keep the stream, as loggers do."""
    write = getattr(stream, "write", None)
    if write is None or hasattr(write, "shows_readable") or isinstance(stream, io.StringIO):
        return

    @wraps(write)
    def show(text: str) -> Any:
        return write(_readable(text) if is_marked(text) else text)

    show.shows_readable = True  # type: ignore[attr-defined]
    with suppress(AttributeError):
        stream.write = show
