"""Writes a model's state dict as a ``torch.save`` file."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from shardwright.checkpoint.disk import Disk, fresh_folder
from shardwright.checkpoint.hugging_face import CONFIG, Exported, ModelTensors, config_text
from shardwright.checkpoint.tensor_file import StoredTensor, TensorSource
from shardwright.torch.checkpoints.stored import tensor_of

__all__ = ["export_state_dict"]

_FILE = "model.pt"


def export_state_dict(
    model: ModelTensors,
    folder: Path,
    *,
    config: Mapping[str, Any] | None,
    disk: Disk | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Exported:
    """Writes ``model.pt``, a plain dictionary of tensors, all of which are in memory at the same time."""
    disk = disk or Disk()
    files = [_FILE]
    with fresh_folder(folder, disk=disk) as draft:
        tell(_FILE)
        made = {id(source): _tensor(source) for source in model.sources.values()}  # tied ones are one
        state = {name: made[id(source)] for name, source in model.sources.items()}
        disk.write_with(draft / _FILE, lambda file: torch.save(state, cast("IO[bytes]", file)))
        if config is not None:
            disk.write(draft / CONFIG, [config_text(config, model.sources)])
            files.append(CONFIG)
    return Exported(files=tuple(files), num_tensors=len(state), num_bytes=model.num_bytes)


def _tensor(source: TensorSource) -> Tensor:
    content = bytearray(source.num_bytes)
    place = 0
    for part in source.read():
        view = memoryview(part)
        content[place : place + view.nbytes] = view
        place += view.nbytes
    return tensor_of(StoredTensor(source.dtype, source.shape, memoryview(content)))
