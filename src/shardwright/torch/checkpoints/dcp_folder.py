"""A folder of `torch.distributed.checkpoint` (DCP), which FSDP2 and torchtitan save: read, and untrusted.

DCP's own reader and planner read it, with two changes. Its list of contents, ``.metadata``, is a pickle:
here it makes nothing but the records that DCP puts there, and then they are compared with the files. What is
no tensor is loaded with ``weights_only=True``.
"""

import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from enum import EnumType
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load

from shardwright.checkpoint.boxes import Box, covered_once
from shardwright.checkpoint.disk import is_plain_name
from shardwright.checkpoint.safe_files import open_regular, reading, size_of
from shardwright.checkpoint.tensor_file import TensorSource
from shardwright.errors import CheckpointError, CorruptCheckpointError
from shardwright.text import shortened
from shardwright.torch.checkpoints.state_dict_files import dtype_name, stored

METADATA = ".metadata"
_LARGEST_METADATA = 2**30  # bytes

Place = tuple[str | int, ...]
"""The keys that led to an entry in what was given to `dcp.save`."""

_DTYPES = {str(each) for each in vars(torch).values() if isinstance(each, torch.dtype)}
_RECORDS = {
    "torch.Size",
    "torch.serialization._get_layout",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    *(
        f"torch.distributed.checkpoint.metadata.{name}"
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


class Leaf(NamedTuple):
    """A tensor that is still in the folder."""

    key: str


class DcpFolder:
    """The entries of a folder.

    Attributes:
        tree: what was given to `dcp.save`, with a `Leaf` for each tensor.
    """

    def __init__(self, path: Path):
        self.path = path
        self._reader = _Reader(path)
        found = self._reader.metadata
        self._tensors = {
            key: entry
            for key, entry in found.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        keys = found.state_dict_metadata.keys()
        plain = self._loaded({key: None for key in keys if key not in self._tensors})
        places = found.planner_data if isinstance(found.planner_data, dict) else {}
        self.tree: dict[str, Any] = _built(
            [(tuple(places.get(key, (key,))), plain[key] if key in plain else Leaf(key)) for key in keys]
        )

    def source(self, leaf: Leaf) -> TensorSource:
        """A tensor that is read when it is written."""
        entry = self._tensors[leaf.key]
        return TensorSource(
            dtype_name(entry.properties.dtype), tuple(entry.size), lambda: [stored(self.read(leaf)).data]
        )

    def read(self, node: Any) -> Any:
        """The same with tensors in the place of leaves."""
        leaves: dict[str, Any] = {}
        _map(node, lambda leaf: leaves.setdefault(leaf.key, self._empty(leaf.key)))
        self._loaded(leaves)
        return _map(node, lambda leaf: leaves[leaf.key])

    def _empty(self, key: str) -> Tensor:
        return torch.empty(self._tensors[key].size, dtype=self._tensors[key].properties.dtype)

    def _loaded(self, state: dict[str, Any]) -> dict[str, Any]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there is no process group, which nothing here needs
                if state:
                    load(state, storage_reader=self._reader, planner=_Planner(), no_dist=True)
        except CheckpointException as error:  # not an Exception
            cause = next(iter(error.failures.values()), (error,))[0]
            why = str(cause).strip().partition("\n")[0][:200]
            raise CorruptCheckpointError(
                f"{self.path} cannot be read: {shortened(list(state))}: {why}. Nothing in it was executed."
            ) from error
        return state


def _built(parts: Sequence[tuple[Place, Any]]) -> Any:
    """Dictionaries and lists, of their entries by place.

    >>> _built([(("a", 0), 1), (("a", 1), 2), (("b",), 3)])
    {'a': [1, 2], 'b': 3}
    """
    if len(parts) == 1 and not parts[0][0]:
        return parts[0][1]
    inside: dict[str | int, list[tuple[Place, Any]]] = {}
    for (first, *rest), value in parts:
        inside.setdefault(first, []).append((tuple(rest), value))
    made = {name: _built(each) for name, each in inside.items()}
    return [made[i] for i in sorted(made)] if all(isinstance(name, int) for name in made) else made


def _map(node: Any, change: Callable[[Leaf], Any]) -> Any:
    if isinstance(node, Leaf):
        return change(node)
    if isinstance(node, dict):
        return {name: _map(each, change) for name, each in node.items()}
    return [_map(each, change) for each in node] if type(node) is list else node


class Refused(NamedTuple):
    """What is no tensor and no plain value; it was not loaded."""

    why: str


class _Planner(DefaultLoadPlanner):
    """DCP's planner for entries by key, which executes nothing that it reads."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: Any, value: Any) -> None:
        try:
            found = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            found = Refused(str(error).partition("\n")[0][:200])
        self.state_dict[read_item.dest_index.fqn] = found


class _Reader(FileSystemReader):
    """DCP's reader, for a list of contents that is read once and checked."""

    def __init__(self, path: Path):
        super().__init__(path)
        try:
            with reading(path), open_regular(path / METADATA) as file:
                if size_of(file) > _LARGEST_METADATA:
                    raise CorruptCheckpointError(
                        f"{path / METADATA} has more than {_LARGEST_METADATA} bytes."
                    )
                records = _Records(file)
                try:
                    found = records.load()
                finally:
                    changed = records.put_back()
            if changed:
                raise CheckpointError(
                    f"{path / METADATA} is refused: it changes {changed[0]} of this program, which was put "
                    "back. Take the folder from whom you trust."
                )
            _check(path, found)
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle raises anything
            raise CorruptCheckpointError(
                f"{path / METADATA} is damaged, or not of torch.distributed.checkpoint "
                f"({type(error).__name__}: {error}). Nothing in it was executed."
            ) from error
        self.metadata: Metadata = found

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self.metadata


class _Records(pickle.Unpickler):
    """Makes the records of DCP's list, and calls nothing else."""

    def __init__(self, file: BinaryIO):
        super().__init__(file)
        self._were: dict[int, tuple[Any, type, dict[str, Any]]] = {}

    def put_back(self) -> list[str]:
        """Undoes what the list has set on classes, as a pickle can on all that it names: their names."""
        changed = []
        for each, kind, had in self._were.values():
            if type(each) is not kind:
                each.__class__ = kind
                changed.append(str(each))
            new = [name for name, value in vars(each).items() if name not in had or had[name] is not value]
            for name in new:
                setattr(each, name, had[name]) if name in had else delattr(each, name)
            changed += [f"{name} of {each!r}" for name in new]
        return changed

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "pathlib" and name.endswith("Path"):
            return self._noted(PurePosixPath)  # where it was saved, on any system
        if f"{module}.{name}" in _RECORDS or f"{module}.{name}" in _DTYPES:
            return self._noted(super().find_class(module, name))
        raise CheckpointError(
            f"a {METADATA} is refused: it names {module[:100]}.{name[:100]}, and the list of a checkpoint "
            "needs no such thing. Nothing in it was executed. Take the folder from whom you trust."
        )

    def _noted(self, found: Any) -> Any:
        for each in (found, *(found if isinstance(found, EnumType) else ())):
            if hasattr(each, "__dict__"):
                self._were.setdefault(id(each), (each, type(each), dict(vars(each))))
        return found


def _check(path: Path, found: Any) -> None:
    """Refuses what leads elsewhere, is not there, or claims more than the files have."""
    if type(found) is not Metadata or not isinstance(found.state_dict_metadata, dict):
        raise CorruptCheckpointError(f"{path / METADATA} is no list of torch.distributed.checkpoint.")
    sizes: dict[str, int] = {}
    for index, info in dict(found.storage_data).items():
        name = info.relative_path
        if (
            type(index) is not MetadataIndex
            or not isinstance(name, str)
            or not is_plain_name(name.lstrip("_"))
        ):
            raise CorruptCheckpointError(f"{path / METADATA} leads to {str(name)[:200]!r}. Nothing was read.")
        if info.transform_descriptors:
            raise CheckpointError(
                f"{path} is compressed ({shortened(list(map(str, info.transform_descriptors)))}). Save it "
                "without extensions of the writer."
            )
        if name not in sizes:
            with open_regular(path / name) as file:
                sizes[name] = size_of(file)
        if not 0 <= info.offset <= info.offset + info.length <= sizes[name]:
            raise CorruptCheckpointError(
                f"{path / name} has {sizes[name]} bytes, and {index.fqn} is at {info.offset} to "
                f"{info.offset + info.length}: it was not copied whole. Get it anew."
            )
    for key, entry in found.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            if not all(box.inside(entry.size) for box in boxes) or not covered_once(entry.size, boxes):
                raise CorruptCheckpointError(
                    f"{path / METADATA}: the pieces of {key} do not make up {tuple(entry.size)}: some ranks "
                    "did not save theirs. Take an earlier checkpoint."
                )
        elif not isinstance(entry, BytesStorageMetadata):
            raise CorruptCheckpointError(f"{path / METADATA}: {key} is a {type(entry).__name__}.")
    _refuse_inflated(path, found.state_dict_metadata, sum(sizes.values()))


def _refuse_inflated(path: Path, entries: Mapping[str, Any], size: int) -> None:
    claimed = sum(
        prod(entry.size) * entry.properties.dtype.itemsize
        for entry in entries.values()
        if isinstance(entry, TensorStorageMetadata)
    )
    if claimed > size:
        raise CorruptCheckpointError(f"{path}: its tensors have {claimed} bytes, and its files have {size}.")
