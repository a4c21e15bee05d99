"""The model of a checkpoint as files for Hugging Face's ``from_pretrained``.

::

    DIR/
      config.json                          what kind of model it is
      model.safetensors                    all tensors; or, above the size of a shard:
      model-00001-of-00003.safetensors     some of them
      model.safetensors.index.json         which tensor is where
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.checkpoint.boxes import Box, boxes_of_range
from shardwright.checkpoint.disk import Disk, fresh_folder
from shardwright.checkpoint.float_types import FLOATS, converted
from shardwright.checkpoint.safe_files import parse, read_regular
from shardwright.checkpoint.saved import SavedCheckpoint
from shardwright.checkpoint.tensor_file import ITEM_BYTES, TensorSource, streamed_content
from shardwright.checkpoint.tensor_index import MODEL, in_order, without_prefix
from shardwright.errors import CheckpointError, CorruptCheckpointError

TIES = "ties.json"
"""The file with the other names of tensors that have several: each with the name that is saved."""

# Bytes that are put together at a time: whatever the size of a tensor, not more is in memory.
_CHUNK = 8 * 2**20


class ModelTensors:
    """The model tensors of a checkpoint, whole, whatever layout saved them.

    Attributes:
        sources: the tensors by name, in order; nothing is read before it is asked for.
        overflowed: by name, how many numbers were finite and have become infinite, in what was read so far.
    """

    def __init__(
        self, saved: SavedCheckpoint, *, prefix: str = "", dtype: str | None = None, ties: bool = False
    ):
        names = [name for name in saved.index.tensors if name.startswith(MODEL)]
        if not names:
            raise CheckpointError(f"{saved.path} has no tensors of a model.")
        bare = without_prefix(names, MODEL, where=str(saved.path))
        others = _other_names(saved, set(bare.values())) if ties else {}
        wanted = without_prefix([*bare.values(), *others], prefix, where=str(saved.path))
        self._saved = saved
        self.overflowed: dict[str, int] = {}
        own = {name: self._source(wanted[name], f"{MODEL}{name}", dtype) for name in bare.values()}
        self.sources: Mapping[str, TensorSource] = {
            wanted[name]: own[others.get(name, name)] for name in in_order(wanted)
        }

    @property
    def num_bytes(self) -> int:
        return sum(source.num_bytes for source in self.sources.values())

    def _source(self, name: str, full: str, dtype: str | None) -> TensorSource:
        entry = self._saved.entry(full)
        target = dtype if dtype is not None and entry.dtype in FLOATS else entry.dtype
        return TensorSource(target, entry.shape, partial(self._read, name, full, target))

    def _read(self, name: str, full: str, target: str) -> Iterator[memoryview]:
        entry = self._saved.entry(full)
        numel, most = prod(entry.shape), _CHUNK // ITEM_BYTES[entry.dtype]
        for start in range(0, numel, most):
            for box in boxes_of_range(entry.shape, start, min(start + most, numel)):
                items = self._items(full, box).data.cast("B")
                if target == entry.dtype:
                    yield items
                    continue
                made = converted(items, source=entry.dtype, target=target)
                if made.num_overflowed:
                    self.overflowed[name] = self.overflowed.get(name, 0) + made.num_overflowed
                yield memoryview(made.data)

    def _items(self, full: str, box: Box) -> NDArray[np.uint8]:
        """The bytes of a part of a tensor, in row-major order."""
        item_bytes = ITEM_BYTES[self._saved.entry(full).dtype]
        made = np.empty((*box.shape, item_bytes), np.uint8)
        for overlap in self._saved.overlaps(full, box):
            piece = np.frombuffer(overlap.stored.data, np.uint8).reshape(*overlap.stored.shape, item_bytes)
            made[overlap.target.slices] = piece[overlap.source.slices]
        return made


def _other_names(saved: SavedCheckpoint, names: set[str]) -> dict[str, str]:
    """The names of tied tensors that are not saved, each with the one that is."""
    found = saved.document(TIES) if TIES in saved.manifest.files else {}
    if not isinstance(found, dict) or not names.issuperset(map(str, found.values())):
        raise CheckpointError(f"{saved.path / TIES} has names of tensors that are not there.")
    return found


CONFIG = "config.json"
_LARGEST_CONFIG = 16 * 2**20  # bytes
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The written files.

    Attributes:
        files: names of the files, in the order in which they were written.
    """

    files: tuple[str, ...]
    num_tensors: int
    num_bytes: int


def export_files(
    model: ModelTensors,
    folder: Path,
    *,
    config: Mapping[str, Any] | None,
    max_shard_bytes: int = 5 * 2**30,
    tell: Callable[[str], None] = lambda text: None,
) -> Exported:
    """Writes the files. Of the tensors, only some MiB are in memory at a time."""
    disk = Disk()
    shards = _shards(model.sources, max_shard_bytes)
    names = _names(len(shards))
    written = []
    with fresh_folder(folder, disk=disk) as draft:

        def write(name: str, content: Any) -> None:
            tell(name)
            disk.write(draft / name, content)
            written.append(name)

        for name, shard in zip(names, shards, strict=True):
            write(name, streamed_content(shard, {"format": "pt"}))
        if len(shards) > 1:
            places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            index = {"metadata": {"total_size": model.num_bytes}, "weight_map": places}
            write("model.safetensors.index.json", [_text(index)])
        if config is not None:
            write(CONFIG, [config_text(config, model.sources)])
    return Exported(files=tuple(written), num_tensors=len(model.sources), num_bytes=model.num_bytes)


def config_text(config: Mapping[str, Any], sources: Mapping[str, TensorSource]) -> bytes:
    """``config.json``, with the type that most of the tensors have, as ``save_pretrained`` does."""
    sizes: dict[str, int] = {}
    for source in sources.values():
        if source.dtype in FLOATS:
            sizes[source.dtype] = sizes.get(source.dtype, 0) + source.num_bytes
    if not sizes:
        return _text(config)
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    return _text({**config, key: _DTYPES[max(sizes, key=lambda dtype: sizes[dtype])]})


def read_config(saved: SavedCheckpoint, path: Path | None) -> dict[str, Any] | None:
    """The content for ``config.json``; returns the configuration; None where there is none."""
    if path is None:
        if CONFIG not in saved.manifest.files:
            return None
        found, where = saved.document(CONFIG), saved.path / CONFIG
    else:
        where = (path / CONFIG if path.is_dir() else path).resolve()
        try:
            found = parse(read_regular(where, most_bytes=_LARGEST_CONFIG), name=str(where))
        except CorruptCheckpointError as error:  # of the checkpoint it says nothing
            raise CheckpointError(f"{error} Give a config.json, or the folder that has it.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{where} is no configuration: it has no object with names.")
    return found


def _shards(sources: Mapping[str, TensorSource], most_bytes: int) -> list[dict[str, TensorSource]]:
    shards: list[dict[str, TensorSource]] = [{}]
    size = 0
    for name, source in sources.items():
        if shards[-1] and size + source.num_bytes > most_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = source
        size += source.num_bytes
    return shards


def _names(number: int) -> list[str]:
    if number == 1:
        return ["model.safetensors"]
    return [f"model-{i:05}-of-{number:05}.safetensors" for i in range(1, number + 1)]


def _text(document: Any) -> bytes:
    return json.dumps(document, indent=2, sort_keys=True).encode() + b"\n"
