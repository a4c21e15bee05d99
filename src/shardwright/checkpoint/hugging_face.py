"""Writes a checkpoint's model as files for Hugging Face's ``from_pretrained``.

::

    DIR/
      config.json                          what kind of model it is
      model.safetensors                    all tensors; or, above the size of a shard:
      model-00001-of-00003.safetensors     some of them
      model.safetensors.index.json         which tensor is where
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.checkpoint.disk import Disk
from shardwright.checkpoint.float_types import FLOATS
from shardwright.checkpoint.fresh_folder import fresh_folder
from shardwright.checkpoint.model_tensors import ModelTensors
from shardwright.checkpoint.regular_file import read_regular
from shardwright.checkpoint.safe_json import parse
from shardwright.checkpoint.saved import SavedCheckpoint
from shardwright.checkpoint.tensor_file import TensorSource, streamed_content
from shardwright.errors import CheckpointError, CorruptCheckpointError

__all__ = ["CONFIG", "Exported", "config_text", "export_files", "read_config"]

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
    disk: Disk | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Exported:
    """Writes the files. Of the tensors, only some MiB are in memory at a time."""
    disk = disk or Disk()
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
    """Tensors by file, in their order."""
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
