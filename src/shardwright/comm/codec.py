"""Encodes the values that ranks exchange as bytes and back, without running code.

A pickle is a program: whoever can write one where a rank reads it controls that rank. This format is data::

    SWv1 | length | JSON                                   | bytes that JSON refers to
                    {"tuple": [3, {"bytes": 0}, "text"]}     0: ...

JSON's own types stand for themselves; anything else is an object with one key, the name of its kind. Kinds
are those below, those that `register` adds, and classes that `declare` names: no other class is ever
instantiated.
"""

import dataclasses
import json
import struct
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from pathlib import Path, PosixPath
from typing import Any, NamedTuple, get_args, get_type_hints

from shardwright import errors
from shardwright.errors import ShardwrightError

_MAGIC = b"SWv1"
_HEAD = struct.Struct("<4sQI")  # magic, bytes of JSON, number of pieces
_LENGTH = struct.Struct("<Q")
_AS_THEY_ARE = (type(None), bool, str, float)
_SMALL = 2**63
_OTHER = "object"

Other = Callable[[Any], bytes]


class DecodeError(ValueError):
    """Bytes that `encode` has not made."""


class _Kind(NamedTuple):
    """The form in which values of one class travel: a value that can travel already."""

    name: str
    to_plain: Callable[[Any], Any]


_BY_CLASS: dict[type, _Kind] = {}
_BY_NAME: dict[str, Callable[[Any], Any]] = {}


def register(kind: type, name: str, to_plain: Callable[[Any], Any], from_plain: Callable[[Any], Any]) -> None:
    """Adds a class, but none of its subclasses."""
    _BY_CLASS[kind] = _Kind(name, to_plain)
    _BY_NAME[name] = from_plain


def declare(*classes: type) -> None:
    """Adds dataclasses, with all that their fields name; enumerations; or models of pydantic."""
    for kind in classes:
        if kind in _BY_CLASS:
            continue
        name = f"{kind.__module__}.{kind.__qualname__}"
        model: Any = kind
        if hasattr(kind, "model_validate_json"):
            register(kind, name, lambda value: value.model_dump_json(), model.model_validate_json)
            continue
        if issubclass(kind, Enum):
            register(kind, name, lambda value: value.name, _members_of(kind))
            continue
        names = [field.name for field in dataclasses.fields(model) if field.init]
        register(kind, name, _fields_of(names), _maker_of(model))
        for hint in get_type_hints(kind).values():
            declare(*(each for each in _classes_in(hint) if _is_declared_too(each)))


def _fields_of(names: list[str]) -> Callable[[Any], Any]:
    return lambda value: {name: getattr(value, name) for name in names}


def _maker_of(kind: Any) -> Callable[[Any], Any]:
    return lambda plain: kind(**plain)


def _members_of(kind: type[Enum]) -> Callable[[Any], Enum]:
    return lambda name: kind[name]


def _is_declared_too(kind: Any) -> bool:
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, Enum))


def _classes_in(hint: Any) -> list[type]:
    inner = get_args(hint)
    return [found for each in inner for found in _classes_in(each)] if inner else [hint]


def encode(value: Any, *, other: Other | None = None) -> bytes:
    pieces: list[bytes] = []
    try:
        text = json.dumps(_plain(value, pieces, other), separators=(",", ":")).encode()
    except RecursionError:
        raise TypeError("containers in it are nested too deeply, or hold themselves") from None
    lengths = b"".join(_LENGTH.pack(len(piece)) for piece in pieces)
    return b"".join((_HEAD.pack(_MAGIC, len(text), len(pieces)), lengths, text, *pieces))


def _plain(value: Any, pieces: list[bytes], other: Other | None) -> Any:
    """A value for JSON; bytes in it are put aside."""
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is int:
        return value if -_SMALL <= value < _SMALL else {"int": hex(value)}
    if kind is list:
        return [_plain(each, pieces, other) for each in value]
    if kind is tuple:
        return {"tuple": [_plain(each, pieces, other) for each in value]}
    if kind is dict:
        return {"dict": [_plain(each, pieces, other) for entry in value.items() for each in entry]}
    if kind is bytes:
        pieces.append(value)
        return {"bytes": len(pieces) - 1}
    known = _BY_CLASS.get(kind)
    if known is None and isinstance(value, ShardwrightError):  # of a kind that only this rank may know
        known = next(_BY_CLASS[base] for base in kind.__mro__ if base in _BY_CLASS)
    if known is not None:
        try:
            return {known.name: _plain(known.to_plain(value), pieces, other)}
        except TypeError:
            if other is None:
                raise
    if other is None:
        raise TypeError(f"a {kind.__module__}.{kind.__qualname__} cannot travel between ranks as data")
    pieces.append(other(value))
    return {_OTHER: len(pieces) - 1}


def decode(data: bytes, *, other: Callable[[bytes], Any] | None = None) -> Any:
    """The value that `encode` made into these bytes."""
    view = memoryview(data)
    try:
        text, pieces = _parts(view)
        return json.loads(text, object_hook=_Maker(pieces, other))
    except (DecodeError, ShardwrightError):
        raise
    except Exception as error:  # makers get what strangers wrote, and may raise anything then
        raise DecodeError(f"no value can be made of them ({type(error).__name__}: {error})") from error


def _parts(view: memoryview) -> tuple[str, list[bytes]]:
    if len(view) < _HEAD.size:
        raise DecodeError(f"they are {len(view)} bytes, too few for any value")
    magic, text_bytes, number = _HEAD.unpack_from(view)
    if magic != _MAGIC:
        raise DecodeError(f"they begin with {magic!r} in the place of {_MAGIC!r}")
    begin = _HEAD.size + number * _LENGTH.size
    if begin + text_bytes > len(view):
        raise DecodeError(f"they are cut off: {len(view)} bytes, of {begin + text_bytes} at least")
    lengths = [_LENGTH.unpack_from(view, _HEAD.size + i * _LENGTH.size)[0] for i in range(number)]
    if begin + text_bytes + sum(lengths) != len(view):
        raise DecodeError(f"they are {len(view)} bytes in the place of {begin + text_bytes + sum(lengths)}")
    at, pieces = begin + text_bytes, []
    for length in lengths:
        pieces.append(bytes(view[at : at + length]))
        at += length
    return str(view[begin : begin + text_bytes], "utf-8"), pieces


class _Maker:
    """Makes values of the objects of JSON, the inner ones first."""

    def __init__(self, pieces: list[bytes], other: Callable[[bytes], Any] | None):
        self._pieces = pieces
        self._other = other

    def __call__(self, found: dict[str, Any]) -> Any:
        if len(found) != 1:
            raise DecodeError(f"an object has {len(found)} keys in the place of one")
        ((name, plain),) = found.items()
        if name == "tuple":
            return tuple(plain)
        if name == "dict":
            return dict(zip(plain[::2], plain[1::2], strict=True))
        if name == "bytes":
            return self._piece(plain)
        if name == _OTHER and self._other is not None:
            return self._other(self._piece(plain))
        make = _BY_NAME.get(name)
        if make is None:
            raise DecodeError(f"no value travels as {name[:80]!r} here")
        return make(plain)

    def _piece(self, index: Any) -> bytes:
        if type(index) is not int or index < 0:
            raise DecodeError(f"{index!r:.80} is no number of a piece")
        return self._pieces[index]


_KNOWN_BY: dict[type[ShardwrightError], str] = {
    errors.PeerLostError: "rank",
    errors.LaunchError: "exit_code",
}


def _registered_errors() -> None:
    kinds = [each for each in vars(errors).values() if isinstance(each, type)]
    for kind in kinds:
        if issubclass(kind, ShardwrightError):
            names = [name for base, name in _KNOWN_BY.items() if issubclass(kind, base)]
            register(kind, kind.__name__, _plain_error(names), _error_maker(kind))


def _plain_error(names: list[str]) -> Callable[[ShardwrightError], dict[str, Any]]:
    def plain(error: ShardwrightError) -> dict[str, Any]:
        kept = {name: getattr(error, name, None) for name in names}
        notes = list(getattr(error, "__notes__", ()))
        return {"text": Exception.__str__(error), "kept": kept, "notes": notes}

    return plain


def _error_maker(kind: type[ShardwrightError]) -> Callable[[Any], ShardwrightError]:
    def make(plain: dict[str, Any]) -> ShardwrightError:
        error = kind(str(plain["text"]), **plain["kept"])
        for note in plain["notes"]:
            error.add_note(str(note))
        return error

    return make


def _path(plain: Any) -> Path:
    return Path(_checked(plain, str))


def _checked(plain: Any, kind: type) -> Any:
    if type(plain) is not kind:
        raise DecodeError(f"a {type(plain).__name__} stands where a {kind.__name__} must")
    return plain


register(int, "int", hex, lambda plain: int(_checked(plain, str), 16))
register(complex, "complex", lambda z: [z.real, z.imag], lambda plain: complex(*plain))
register(slice, "slice", lambda s: [s.start, s.stop, s.step], lambda plain: slice(*plain))
register(OrderedDict, "ordered", dict, OrderedDict)
register(set, "set", list, set)
register(frozenset, "frozenset", list, frozenset)
register(bytearray, "bytearray", bytes, lambda plain: bytearray(_checked(plain, bytes)))
register(type(Ellipsis), "ellipsis", lambda _: None, lambda _: Ellipsis)
register(range, "range", lambda r: [r.start, r.stop, r.step], lambda plain: range(*plain))
register(PosixPath, "path", str, _path)
_registered_errors()
