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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from shardwright.checkpoint.importing import names_in_archive, names_in_old_file, pickle_in_archive
from shardwright.errors import CheckpointError, CorruptCheckpointError
from smdistributed.modelparallel.torch.pickles.harmless_classes import harmless
from smdistributed.modelparallel.torch.pickles.stand_ins import without_stand_ins

TRUST = "SHARDWRIGHT_TRUST_PICKLE"
_NAMED = re.compile(r"(?:GLOBAL|unsupported GLOBAL) ([\w.<>]+)")
_ZIP = b"PK\x03\x04"


def saves(obj: Any, **options: Any) -> Callable[[Any], None]:
    """What writes an object to a file, as `torch.save` does."""

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
        map_location: as for `torch.load`; None for where tensors were saved, or the CPU without a GPU.
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
    except OSError:
        raise
    except Exception as error:  # a damaged pickle makes it raise anything
        raise CorruptCheckpointError(f"{path} cannot be read: {_first_line(error)}") from error


def _as_weights(path: Path, options: dict[str, Any]) -> Any:
    names, is_checked = _names(path)
    allowed = {name: found for name in names if (found := harmless(name)) is not None}
    try:
        with _allowing(allowed):
            loaded = torch.load(path, weights_only=True, **options)
        return without_stand_ins(loaded) if allowed else loaded
    except OSError:
        raise
    except Exception as error:  # a damaged file makes it raise anything
        raise _unreadable(path, error, is_checked=is_checked) from error


def _names(path: Path) -> tuple[set[str], bool]:
    """What a file names, as it is called today, and whether it is known to be as it was saved."""
    with path.open("rb") as file:
        zipped = file.read(len(_ZIP)) == _ZIP  # as torch.load tells them apart
        file.seek(0)
        try:
            if not zipped:
                return set(map(_name_today, names_in_old_file(file))), False
            with zipfile.ZipFile(file) as archive:
                is_checked = pickle_in_archive(archive).CRC != 0
                return set(map(_name_today, names_in_archive(archive))), is_checked
        except Exception as error:
            raise CorruptCheckpointError(
                f"{path} cannot be read: {_first_line(error)} It is damaged, or no file of torch.save. Take "
                "another copy of it."
            ) from error


@contextlib.contextmanager
def _allowing(allowed: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """What the reader may call meanwhile: ours, and what the script has allowed under other names.

    PyTorch keeps one set of these. Where a class is in it under a name of ours, as NumPy's are for the
    Trainer, it is chance which of both the reader gets, and theirs needs still more.
    """
    before = torch.serialization.get_safe_globals()
    others = [entry for entry in before if harmless(_name_of(entry)) is None]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([*others, *((found, name) for name, found in allowed.items())])
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _name_of(entry: Any) -> str:
    """Under which name a class or function may stand in files, if it is one of the reader's."""
    return str(entry[1]) if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"


def _name_today(name: str) -> str:
    """The name of a class; pickles of old protocols have those of Python 2."""
    module, _, last = name.rpartition(".")
    renamed = _compat_pickle.NAME_MAPPING.get((module, last))
    return ".".join(renamed or (_compat_pickle.IMPORT_MAPPING.get(module, module), last))


def _unreadable(path: Path, error: Exception, *, is_checked: bool) -> CheckpointError:
    named = _NAMED.search(str(error)) if isinstance(error, pickle.UnpicklingError) else None
    if named is not None:
        name = _name_today(named[1] if "." in named[1] else f"builtins.{named[1]}")
        damaged = "" if is_checked else " Or the file is damaged: it has no checksum."
        return CheckpointError(
            f"{path} has a {name}, which is none of the classes that are known to be "
            "harmless, so that loading it could run code. Nothing of it was run. If you trust "
            f"whoever wrote the file, set the environment variable {TRUST}=1; or save plain "
            f"numbers, texts, lists and dictionaries in its place.{damaged}"
        )
    return CorruptCheckpointError(
        f"{path} cannot be read: {_first_line(error)} It is damaged, or has what only a pickle can have; if "
        f"you trust whoever wrote it, set the environment variable {TRUST}=1."
    )


def _first_line(error: Exception) -> str:
    """What is wrong, without PyTorch's own advice."""
    text = str(error).partition("WeightsUnpickler error:")[2] or str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300].rstrip(".") + "."
