"""``smp.sharded_data_parallel_checkpoint``: the whole model from a partial checkpoint, without ranks."""

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import CheckpointError
from smdistributed.modelparallel.torch.checkpoints.flat_shards import parameters_in
from smdistributed.modelparallel.torch.checkpoints.folder import (
    MANIFEST,
    USER_CONTENT,
    CheckpointFolder,
    tag_of,
)
from smdistributed.modelparallel.torch.checkpoints.sharded_rank_files import (
    BUFFER_NAMES,
    PARAM_SHAPES,
    shard_files,
    weights_in,
)
from smdistributed.modelparallel.torch.pickles.files import load_file


def get_full_state_dict_from_sharded_data_parallel_checkpoint(
    dir: str | os.PathLike[str],
    tag: str | None = None,
    dtype: torch.dtype | None = torch.float32,
) -> "OrderedDict[str, Tensor]":
    """The state of the whole model, under the names of the user's module; a plain model loads it."""
    folder = _folder_of(Path(dir), tag)
    stages = sorted(
        int(path.stem.removeprefix("model_"))
        for path in folder.glob("model_*.pt")
        if path.stem.removeprefix("model_").isdigit()
    )
    if not stages:
        raise CheckpointError(
            f"{folder} has no shards (model_0.pt): it was saved without sharded_data_parallel_degree. Load "
            "it by smp.resume_from_checkpoint."
        )
    found: dict[str, Any] = {}
    names: list[str] = []
    for stage in stages:
        state, described = _weights(folder, stage)
        found.update(state)
        names = names or [name.removeprefix("module.") for name in described.get("names", ())]
    ordered = [*(name for name in names if name in found), *(name for name in found if name not in names)]
    return OrderedDict((name, _cast(found[name], dtype)) for name in ordered)


def _folder_of(root: Path, tag: str | None) -> Path:
    """The folder with the files, which are compared with their checksums where there are some."""
    checkpoints = CheckpointFolder(root)
    chosen = checkpoints.newest() if tag is None else tag_of(tag)
    if (root / chosen).is_dir() and not (root / f"{chosen}_partial").is_dir():  # where other tools look
        if not (root / chosen / MANIFEST).exists():
            return root / chosen
        return checkpoints.partial_at(root / chosen).verified()
    return checkpoints.partial(chosen).verified()


def _weights(folder: Path, stage: int) -> tuple[dict[str, Any], dict[str, Any]]:
    described = load_file(folder / f"model_{stage}.pt", "cpu", mmap=True)
    if PARAM_SHAPES in described:
        return weights_in(folder, stage)
    # As the original library has saved it: the script kept what there is.
    content = load_file(folder / USER_CONTENT, "cpu")
    shards = [load_file(file, "cpu", mmap=True) for file in shard_files(folder, stage)]
    found = {k: v for k, v in described["module"].items() if k in set(content[BUFFER_NAMES])}
    flats = [shard["fp32_flat_groups"] for shard in shards]
    found.update(parameters_in(flats, content[PARAM_SHAPES], source=str(folder)))
    return {name.removeprefix("module."): value for name, value in found.items()}, {}


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(dtype, copy=True) if dtype is not None and value.is_floating_point() else value.clone()
