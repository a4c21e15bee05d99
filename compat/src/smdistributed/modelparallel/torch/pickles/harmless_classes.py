"""Classes that a file of a checkpoint may name: what they do with any arguments at all is harmless.

A pickle calls what it names, with arguments of its own, and fills in attributes. So a class is in here only
if nothing that a file could call it with runs other code, reads or writes a file, starts anything, or takes
more memory than a few times the file. For those that do more, something else stands while the file is read:
see `stand_ins`.
"""

import argparse
import datetime
import importlib
import pathlib
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy

from shardwright.torch.loss_scale import LossScaler
from shardwright.torch.pytorch.modules import is_script_class
from smdistributed.modelparallel.torch.pickles.stand_ins import (
    SavedArray,
    SavedAttributes,
    SavedRange,
    SavedType,
)

_Named = dict[str, Callable[..., Any]]

_OF_EVERY_OBJECT = ("__new__", "__reduce__", "__reduce_ex__", "__getattribute__")
_CONFIGURATION = re.compile(r"(transformers\.models\.\w+\.configuration_\w+)\.(\w+)")


def harmless(name: str) -> Callable[..., Any] | None:
    """What a file gets for a name; None where that is not known to be harmless."""
    return _KNOWN.get(name) or _configuration(name) or _of_attributes_alone(name)


def _reconstruct(*_: Any) -> SavedArray:
    return SavedArray()


def _no_bytes() -> bytes:
    """``bytes`` with an argument could take any amount of memory; empty ones are saved as a call without."""
    return b""


def _frozen(items: Any = ()) -> frozenset[Any]:
    """A set from the list that is in the file: what else can be iterated over may take any memory."""
    if type(items) not in (list, tuple):
        raise ValueError(f"a frozenset of a {type(items).__name__} is not restored")
    return frozenset(items)


def _scalar(saved: SavedType, content: bytes) -> Any:
    if not isinstance(saved, SavedType) or not isinstance(content, bytes):
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
    return type(real.__name__, (SavedAttributes,), {"real": real})


def _of_attributes_alone(name: str) -> Callable[..., Any] | None:
    """A class that restores the attributes of one of the script's, such as its loss scaler.

    Only of one that the script has imported: a name in a file imports nothing.
    """
    module, _, last = name.rpartition(".")
    real: Any = getattr(sys.modules.get(module), "__dict__", {}).get(last)
    # Not isinstance(): what is no class may do things when it is asked for its own.
    if not issubclass(type(real), type) or not (real is LossScaler or is_script_class(real)):
        return None
    if not _runs_nothing(real):
        return None
    return type(real.__name__, (SavedAttributes,), {"real": real, "may_be_empty": True})


def _runs_nothing(kind: type) -> bool:
    """Whether an object is its attributes alone, and runs no code of its class as it comes and goes."""
    made = all(getattr(kind, name) is getattr(object, name) for name in _OF_EVERY_OBJECT)
    hashes: tuple[Any, ...] = (object.__hash__, None)
    hashed = kind.__hash__ in hashes
    if not made or not hashed or hasattr(kind, "__setstate__") or hasattr(kind, "__del__"):
        return False
    if not kind.__dictoffset__ and hasattr(kind, "__getattr__"):
        return False  # that would be asked for the namespace that is not there
    found = [vars(base) for base in kind.__mro__[:-1]]
    namespaces = {type(names["__dict__"]) for names in found if "__dict__" in names}
    return namespaces <= {types.GetSetDescriptorType} and not any("__class__" in names for names in found)


_KNOWN: _Named = {
    "argparse.Namespace": argparse.Namespace,
    "types.SimpleNamespace": types.SimpleNamespace,
    "datetime.date": datetime.date,
    "datetime.datetime": datetime.datetime,
    "datetime.timedelta": datetime.timedelta,
    "datetime.timezone": datetime.timezone,
    "builtins.frozenset": _frozen,
    "builtins.bytes": _no_bytes,
    "builtins.slice": slice,
    "builtins.range": SavedRange,
    "numpy.dtype": SavedType,
    "numpy.ndarray": SavedArray,
    **{
        f"{module}.{path}": getattr(pathlib, path)
        for module in ("pathlib", "pathlib._local")
        for path in ("PosixPath", "PurePosixPath", "PureWindowsPath")
    },
    **{f"numpy.{core}.multiarray._reconstruct": _reconstruct for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
}
