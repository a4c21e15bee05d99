"""Reads untrusted JSON and YAML to plain data: objects, lists, text, numbers, flags, null.

It refuses what other readers accept silently: duplicate names, NaN and numbers of hundreds of digits, nesting
that breaks whoever walks it, characters that no name has, and YAML features that no settings need: tags, and
aliases, a few lines of which expand to gigabytes.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import yaml

from shardwright.text import control_in, shown

_DEEPEST = 64
_MOST_DIGITS = 30
_SHOWN = 200  # letters of a name
_NUMBER_LIMIT = 10**_MOST_DIGITS

_Path = tuple[Any, ...]
"""``(around, key)``, where ``around`` is the path of the object or list; empty for the whole document."""


class DocumentError(ValueError):
    """A text is no document that can be used; the message is one line without a full stop."""

    @property
    def predicate(self) -> str:
        """The same as what is said of a file."""
        text = str(self)
        return f"is {text}" if text.startswith("no ") else f"cannot be used: {text}"

    @property
    def is_other_text(self) -> bool:
        """Whether it is not JSON, or not YAML, at all."""
        return str(self).startswith(("no JSON", "no YAML"))


def parse_json(content: str | bytes, *, free_text: bool = False) -> Any:
    """Reads JSON.

    >>> parse_json('{"microbatches": 4}')
    {'microbatches': 4}
    >>> parse_json('{"stages": [{"rank": 1e999}]}')
    Traceback (most recent call last):
        ...
    shardwright.files.documents.DocumentError: stages.0.rank is inf, but it must be a finite number
    """
    text = _decoded(content)
    try:
        try:
            found = json.loads(text, object_pairs_hook=no_name_twice)
        except json.JSONDecodeError:
            raise
        except DocumentError:
            raise
        except ValueError:  # Python reads no numbers of thousands of digits: find out where it stands
            found = json.loads(text, object_pairs_hook=no_name_twice, parse_int=_bounded)
    except json.JSONDecodeError as error:
        raise DocumentError(f"no JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise DocumentError(_TOO_DEEP) from None
    check_document(found, free_text=free_text)
    return found


def parse_yaml(content: str | bytes) -> Any:
    """Reads YAML, of which JSON is a part; None of an empty text. Dates stay text, and so does ``010``.

    >>> parse_yaml("device: {name: 2026-01-01, flops_per_s: 312e12}")
    {'device': {'name': '2026-01-01', 'flops_per_s': 312000000000000.0}}
    """
    text = _decoded(content)
    try:
        _refuse_events(text)
        found = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        problem = str(error.problem or error.context)
        tab = " (a tab? Indent with spaces)" if "cannot start any token" in problem and "\t" in text else ""
        raise DocumentError(f"no YAML: {where}{problem}{tab}") from None
    except yaml.reader.ReaderError as error:
        raise DocumentError(f"no YAML: {error.reason} (character {error.character!r})") from None
    except yaml.YAMLError as error:
        raise DocumentError(f"no YAML: {' '.join(str(error).split())}") from None
    check_document(found)
    return found


def format_yaml(document: Any) -> str:
    """Plain data as YAML, of which `parse_yaml` makes the same: text that looks like a number is quoted."""
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=110)
    return text


def check_document(document: Any, *, free_text: bool = False) -> None:
    """Refuses plain data that is nested too deep."""
    for depth, path, value in _walk(document):
        reason = _unfit(value, free_text) if depth <= _DEEPEST else _TOO_DEEP
        if reason is None and isinstance(value, dict):
            reason = next(filter(None, (_unfit_key(key, free_text) for key in value)), None)
        if reason is not None:
            raise DocumentError(reason if reason == _TOO_DEEP else f"{_name(path) or 'it'} {reason}")


_TOO_DEEP = f"it is nested more than {_DEEPEST} deep"


def _walk(document: Any) -> Iterator[tuple[int, _Path, Any]]:
    """All values with their depth and path. Nothing here recurses, and nothing goes deeper than it must."""
    waiting: list[tuple[int, _Path, Any]] = [(0, (), document)]
    while waiting:
        depth, path, value = waiting.pop()
        yield depth, path, value
        if isinstance(value, dict):
            waiting += [(depth + 1, (path, key), inside) for key, inside in value.items()]
        elif isinstance(value, list):
            waiting += [(depth + 1, (path, index), inside) for index, inside in enumerate(value)]


def _unfit(value: Any, free_text: bool) -> str | None:
    if isinstance(value, str):
        return _unfit_text(value, free_text)
    if isinstance(value, float):
        return None if math.isfinite(value) else f"is {value}, but it must be a finite number"
    if isinstance(value, int):
        fits = -_NUMBER_LIMIT < value < _NUMBER_LIMIT
        return None if fits else f"has more than {_MOST_DIGITS} digits, and no number here does"
    if value is None or isinstance(value, dict | list):
        return None
    return f"is a {type(value).__name__}, but it must be text, a number, a list or an object"


def _unfit_text(text: str, free: bool) -> str | None:
    if text.isascii() and text.isprintable():
        return None
    if any("\ud800" <= each <= "\udfff" for each in text):
        return "has half a character of Unicode (a lone surrogate)"
    control = None if free else control_in(text)
    if control is None:
        return None
    return f"is {shown(text)}, but it must not have control characters such as {control}"


def _unfit_key(key: Any, free_text: bool) -> str | None:
    if not isinstance(key, str):
        return f"has the key {shown(key)}, but keys must be text"
    reason = _unfit_text(key, free_text)
    return None if reason is None else f"has a key that {reason}"


def _name(path: _Path) -> str:
    keys = []
    while path:
        path, key = path
        keys.append(str(key)[:_SHOWN])
    return ".".join(reversed(keys))


def _decoded(content: str | bytes) -> str:
    if isinstance(content, str):
        return content
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(f"no UTF-8 text: byte {error.start} is {content[error.start]:#04x}") from None


def no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, for ``object_pairs_hook``; raises DocumentError if a name is there twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise DocumentError(f"{shown(name)} is there twice in one object")
            seen.add(name)
    return found


def _bounded(digits: str) -> int:
    """A number; of one that is too long, one that is as surely refused."""
    return int(digits) if len(digits) <= 2 * _MOST_DIGITS else _NUMBER_LIMIT


_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_BASE):  # type: ignore[misc]
    """YAML's safe loader, with the numbers of YAML 1.2: ``1e9`` is one, ``010`` and dates are text."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Refuses a duplicate key, where other loaders take the last."""
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{shown(key.value)} is there twice", key.start_mark
                    )
                seen.add((key.tag, key.value))
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


class _Dumper(yaml.SafeDumper):
    """YAML's safe dumper; it knows besides its own plain words those of `_Loader`."""


_PLAIN_WORDS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"(?i:yes|no|true|false|on|off)", list("yYnNtTfFoO")),
    ("int", r"[-+]?(?:0|[1-9][0-9]{0,99})", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?i:inf)|\.(?i:nan)",
        list("-+.0123456789"),
    ),
)
for _tag, _words, _first in _PLAIN_WORDS:
    for _reader_or_writer in (_Loader, _Dumper):
        _reader_or_writer.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_words})\\Z"), _first
        )


def _refuse_events(text: str) -> None:
    """Refuses aliases, tags and deep nesting before anything is built of them."""
    depth = 0
    for event in yaml.parse(text, Loader=_BASE):
        if isinstance(event, yaml.AliasEvent):
            _refuse(event, f"it has an alias (*{event.anchor}); write out what it stands for")
        tag = getattr(event, "tag", None)
        if tag not in (None, "!"):
            _refuse(event, f"it has the tag {shown(tag)}, which no field needs; leave it out")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _DEEPEST:
                _refuse(event, _TOO_DEEP)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _refuse(event: Any, problem: str) -> None:
    raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
