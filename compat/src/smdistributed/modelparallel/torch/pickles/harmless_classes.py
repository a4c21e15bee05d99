"""Classes that a file of a checkpoint may name: what they do with any arguments at all is harmless.

A pickle calls what it names, with arguments of its own, and fills in attributes. So a class is in here only
if nothing that a file could call it with runs other code, reads or writes a file, or starts anything. Of
numpy's arrays and the configurations of Hugging Face models, whose classes do more, just the contents are
restored.
"""

import argparse
import datetime
import importlib
import pathlib
import re
import types
from collections.abc import Callable
from typing import Any

import numpy

__all__ = ["harmless"]

_Named = dict[str, Callable[..., Any]]

_CONFIGURATION = re.compile(r"(transformers\.models\.\w+\.configuration_\w+)\.(\w+)")


def harmless(name: str) -> Callable[..., Any] | None:
    """What a file gets for a name; None where that is not known to be harmless.

    Args:
        name: of a class or function, with its module.
    """
    return _KNOWN.get(name) or _configuration(name)


class _SavedType:
    """Stands for a ``numpy.dtype``: of numbers, texts and bytes, and of nothing else."""

    def __init__(self, code: str, *flags: Any):
        if not isinstance(code, str) or re.fullmatch(r"[biufcSU]\d{0,4}", code) is None:
            raise ValueError(f"arrays of {code!r} are not restored")
        self.dtype = numpy.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = state[1]
        if order in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(order)
        if self.dtype.kind in "SU" and self.dtype.itemsize == 0 and isinstance(state[5], int):
            self.dtype = numpy.dtype(f"{self.dtype.kind}{state[5] // (4 if self.dtype.kind == 'U' else 1)}")


class _SavedArray(numpy.ndarray[Any, Any]):
    """An array whose contents come with its state."""

    def __new__(cls) -> "_SavedArray":
        return super().__new__(cls, 0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        version, shape, saved, is_fortran, content = state
        if not isinstance(saved, _SavedType) or not isinstance(content, bytes):
            raise ValueError("the array is not restored: it has other contents than numbers and texts")
        super().__setstate__((version, shape, saved.dtype, is_fortran, content))


def _reconstruct(*_: Any) -> _SavedArray:
    return _SavedArray()


def _no_bytes() -> bytes:
    """``bytes`` with an argument could take any amount of memory; empty ones are saved as a call without."""
    return b""


def _scalar(saved: _SavedType, content: bytes) -> Any:
    if not isinstance(saved, _SavedType) or not isinstance(content, bytes):
        raise ValueError("the number is not restored: it is of another kind")
    return numpy.frombuffer(content, dtype=saved.dtype, count=1)[0]


def _configuration(name: str) -> Callable[..., Any] | None:
    """A class that restores the attributes of a configuration of Hugging Face, and runs nothing of it."""
    found = _CONFIGURATION.fullmatch(name)
    if found is None:
        return None
    try:
        base = importlib.import_module("transformers").PretrainedConfig
        real = getattr(importlib.import_module(found[1]), found[2], None)
    except ImportError:
        return None
    if not isinstance(real, type) or not issubclass(real, base):
        return None
    return _attributes_only(real)


def _attributes_only(real: type) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise ValueError(f"a file may have the attributes of a {real.__name__}, and may not call it")

    def restore(self: Any, state: dict[str, Any]) -> None:
        self.__dict__.update({key: value for key, value in state.items() if isinstance(key, str)})
        self.__class__ = real

    return type(real.__name__, (real,), {"__init__": refuse, "__setstate__": restore, "__slots__": ()})


_KNOWN: _Named = {
    "argparse.Namespace": argparse.Namespace,
    "types.SimpleNamespace": types.SimpleNamespace,
    "datetime.date": datetime.date,
    "datetime.datetime": datetime.datetime,
    "datetime.timedelta": datetime.timedelta,
    "datetime.timezone": datetime.timezone,
    "builtins.frozenset": frozenset,
    "builtins.bytes": _no_bytes,
    "builtins.slice": slice,
    "builtins.range": range,
    "numpy.dtype": _SavedType,
    "numpy.ndarray": _SavedArray,
    **{
        f"{module}.{path}": getattr(pathlib, path)
        for module in ("pathlib", "pathlib._local")
        for path in ("PosixPath", "PurePosixPath", "PureWindowsPath")
    },
    **{f"numpy.{core}.multiarray._reconstruct": _reconstruct for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
}
