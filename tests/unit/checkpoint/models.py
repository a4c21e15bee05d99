"""Checkpoints of models for tests, in pieces as several ranks would save them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwright.checkpoint.boxes import Box
from shardwright.checkpoint.disk import Disk
from shardwright.checkpoint.folder import CheckpointFolder
from shardwright.checkpoint.saved import TensorPart, add_tensors
from shardwright.checkpoint.tensor_index import INDEX, TensorIndex
from shardwright.torch.checkpoints.state_dict_files import stored


def save_model(
    root: Path, step: int, state: Mapping[str, Tensor], *, config: Mapping[str, Any] | None = None
) -> None:
    """Saves tensors as two ranks would: each cut in two along one of its dimensions, in turns."""
    disk = Disk()
    folder = CheckpointFolder(root)
    draft = folder.begin(step)
    parts: tuple[list[TensorPart], list[TensorPart]] = ([], [])
    for number, (name, tensor) in enumerate(state.items()):
        for rank, box in enumerate(_boxes(tuple(tensor.shape), dim=number % max(1, tensor.dim()))):
            piece = stored(tensor[box.slices])
            parts[rank].append(TensorPart(f"model/{name}", whole=tuple(tensor.shape), box=box, stored=piece))
    names = [f"rank-{rank:05}.safetensors" for rank in range(len(parts))]
    written = [add_tensors(draft, names[rank], own, disk=disk) for rank, own in enumerate(parts)]
    index = TensorIndex.joined([tensors for _, tensors in written])
    entries = {name: entry for name, (entry, _) in zip(names, written, strict=True)}
    document = {"version": 1, "step": step, "layout": None}
    entries["state.json"] = disk.write(draft / "state.json", [json.dumps(document).encode()])
    entries[INDEX] = disk.write(draft / INDEX, [index.to_bytes()])
    if config is not None:
        entries["config.json"] = disk.write(draft / "config.json", [json.dumps(config).encode()])
    folder.commit(draft, step=step, files=entries)


def _boxes(shape: tuple[int, ...], *, dim: int) -> Iterator[Box]:
    """All of a tensor, or two parts of different sizes."""
    if not shape or shape[dim] < 2:
        yield Box.whole(shape)
        return
    cut = (shape[dim] + 2) // 3
    for start, stop in ((0, cut), (cut, shape[dim])):
        offset = [0] * len(shape)
        offset[dim] = start
        lengths = [*shape]
        lengths[dim] = stop - start
        yield Box(tuple(offset), tuple(lengths))
