"""Files that `torch.save` has written: read without running anything of what they name.

A checkpoint of SageMaker's library is a pickle, and a pickle can run any code when it is loaded. So no file
is loaded as a pickle: PyTorch's reader of weights reads it, which calls only what it is told to. That is what
`harmless_classes` has. ``SHARDWRIGHT_TRUST_PICKLE=1`` has files loaded as pickles after all.
"""

import _compat_pickle
import contextlib
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from shardwright.errors import CheckpointError, CorruptCheckpointError
from smdistributed.modelparallel.torch.pickles.harmless_classes import harmless

__all__ = ["TRUST", "load_file", "saves"]

TRUST = "SHARDWRIGHT_TRUST_PICKLE"
_NAMED = re.compile(r"(?:GLOBAL|unsupported GLOBAL) ([\w.<>]+)")
_MOST_CLASSES = 100


def saves(obj: Any, **options: Any) -> Callable[[Any], None]:
    """What writes an object to a file, as `torch.save` does.

    Args:
        obj: what is saved.
        options: of `torch.save`.
    """

    def save(file: Any) -> None:
        torch.save(obj, file, **options)

    return save


def load_file(
    path: str | os.PathLike[str],
    map_location: Any = None,
    *,
    mmap: bool = False,
    pickle_module: Any = None,
) -> Any:
    """Reads a file that `torch.save` has written.

    Args:
        path: the file.
        map_location: as for `torch.load`; None for where tensors were saved, or the CPU without a GPU.
        mmap: tensors stay in the file until they are used.
        pickle_module: what a trusted file is loaded with.

    Raises:
        CheckpointError: there is no such file, or it names a class that may not be harmless.
        CorruptCheckpointError: it cannot be read.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path} is not there, or is no file.")
    if map_location is None and not torch.cuda.is_available():
        map_location = "cpu"
    options: dict[str, Any] = {"map_location": map_location}
    if mmap and zipfile.is_zipfile(path):
        options["mmap"] = True
    if os.environ.get(TRUST) == "1":
        return _as_pickle(path, {**options, "pickle_module": pickle_module or pickle})
    return _as_weights(path, options)


def _as_pickle(path: Path, options: dict[str, Any]) -> Any:
    try:
        return torch.load(path, weights_only=False, **options)
    except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError) as error:
        raise CorruptCheckpointError(f"{path} cannot be read: {_first_line(error)}") from error


def _as_weights(path: Path, options: dict[str, Any]) -> Any:
    allowed: list[tuple[Callable[..., Any], str]] = []
    while True:
        try:
            with _allowing(allowed):
                return torch.load(path, weights_only=True, **options)
        except pickle.UnpicklingError as error:
            name = _next_name(path, str(error), [known for _, known in allowed])
            if name is None:
                raise _unreadable(path, error) from error
            found = harmless(name)
            if found is None:
                raise CheckpointError(
                    f"{path} has a {_name_today(name)}, which is none of the classes that are known to be "
                    "harmless, so that loading it could run code. Nothing of it was run. If you trust "
                    f"whoever wrote the file, set the environment variable {TRUST}=1; or save plain "
                    "numbers, texts, lists and dictionaries in its place."
                ) from error
            allowed.append((found, name))
        except (EOFError, RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise _unreadable(path, error) from error


@contextlib.contextmanager
def _allowing(allowed: list[tuple[Callable[..., Any], str]]) -> Iterator[None]:
    """What the reader may call meanwhile: ours, and what the script has allowed under other names.

    PyTorch keeps one set of these. Where a class is in it under a name of ours, as NumPy's are for the
    Trainer, it is chance which of both the reader gets, and theirs needs still more.
    """
    before = torch.serialization.get_safe_globals()
    others = [entry for entry in before if harmless(_name_of(entry)) is None]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([*others, *allowed])
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _name_of(entry: Any) -> str:
    """Under which name a class or function may stand in files, if it is one of the reader's."""
    return str(entry[1]) if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"


def _next_name(path: Path, message: str, known: list[str]) -> str | None:
    """The class that the reader would not take; None where that is not what it complains of."""
    found = _NAMED.search(message)
    if found is None or len(known) >= _MOST_CLASSES:
        return None
    name = found[1] if "." in found[1] else f"builtins.{found[1]}"
    return None if name in known else name


def _name_today(name: str) -> str:
    """The name of a class; pickles of old protocols have those of Python 2."""
    module, _, last = name.rpartition(".")
    renamed = _compat_pickle.NAME_MAPPING.get((module, last))
    return ".".join(renamed or (_compat_pickle.IMPORT_MAPPING.get(module, module), last))


def _unreadable(path: Path, error: Exception) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path} cannot be read: {_first_line(error)} It is damaged, or has what only a pickle can have; if "
        f"you trust whoever wrote it, set the environment variable {TRUST}=1."
    )


def _first_line(error: Exception) -> str:
    """What is wrong, without PyTorch's own advice."""
    text = str(error).partition("WeightsUnpickler error:")[2] or str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300].rstrip(".") + "."
