"""The files of a partial checkpoint of sharded data parallelism.

::

    model_0.pt           "module": buffers and parameters that are not trained
                         "param_shapes", "buffer_names", "names", "aliases": what there is, and in which order
    optimizer_{i}.pt     of shard i: "partition_count", "fp32_flat_groups" (the weights), "optimizer_state"

With several partitions, the number of the partition comes first: ``model_1.pt``, ``optimizer_1_0.pt``. Names
of the model begin with ``module.``, as those of the wrapped model do. The weights are what the optimizer
updates: float32, also where the model is in 16 bits. What ranks of a tensor-parallel group share is whole
here, and the first of them writes it.
"""

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.checkpoint.boxes import Box
from shardwright.errors import CorruptCheckpointError
from shardwright.torch._private.modules import non_persistent_buffers
from shardwright.torch.startup import ScriptRun
from shardwright.torch.tensor_parallel.divided_tensor import whole as whole_of
from smdistributed.modelparallel.comm import allgather
from smdistributed.modelparallel.groups import CommGroup
from smdistributed.modelparallel.torch.checkpoints.flat_shards import flat_part, parameters_in
from smdistributed.modelparallel.torch.pickles.files import load_file
from smdistributed.modelparallel.torch.state_dicts.optimizer_entries import (
    MASTER,
    Entries,
    Part,
    merged,
    parts_of,
    put_together,
)

PARAM_SHAPES = "param_shapes"
BUFFER_NAMES = "buffer_names"
_PREFIX = "module."

_Groups = list[list[tuple[str, nn.Parameter]]]


# ---- saving ----


def sharded_contents(run: ScriptRun, model: Any, optimizer: Any) -> dict[str, Any]:
    """What this rank writes, by name of the file; collective over the ranks with the same stage."""
    groups = _trained(model, optimizer)
    shard, num_shards = run.data_rank % run.mesh.shard, run.mesh.shard
    contents: dict[str, Any] = {}
    with model.replicas.all_rows():
        described = _described(model, groups)
        flat = [
            torch.cat(
                [
                    torch.zeros(0),
                    *(_own_flat(p, name, model, optimizer, shard, num_shards) for name, p in group),
                ]
            )
            for group in groups
        ]
    state = None if optimizer is None else _state_of(run, model, optimizer)
    if run.tensor_rank:
        return contents
    if run.data_rank == 0:
        contents[f"model_{run.pipeline_rank}.pt"] = described
    if run.data_rank < num_shards:
        contents[_optimizer_file(run, shard)] = {
            "partition_count": num_shards,
            "fp32_flat_groups": flat,
            **({} if state is None else {"optimizer_state": state}),
        }
    return contents


def _optimizer_file(run: ScriptRun, shard: int) -> str:
    stage = f"{run.pipeline_rank}_" if run.mesh.pipeline > 1 else ""
    return f"optimizer_{stage}{shard}.pt"


def _trained(model: Any, optimizer: Any) -> _Groups:
    """The parameters of this rank that are trained, with their names, by group of the optimizer."""
    names = {id(p): name for name, p in model.local_named_parameters() if p.requires_grad}
    if optimizer is None:
        return [[(name, p) for name, p in model.local_named_parameters() if p.requires_grad]]
    return [[(names[id(p)], p) for p in group if id(p) in names] for group in optimizer.fp16_groups]


def _described(model: Any, groups: _Groups) -> dict[str, Any]:
    """What is no weight that is trained, and what there is."""
    module = model.get_module()
    trained = {id(p) for group in groups for _, p in group}
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    by_name = dict(module.named_parameters(remove_duplicate=False))
    for name, parameter in by_name.items():
        if (known := first.setdefault(id(parameter), name)) != name:
            aliases[_PREFIX + name] = _PREFIX + known
    transient = non_persistent_buffers(module)
    others = {
        _PREFIX + name: whole_of(value).clone() if isinstance(value, Tensor) else value
        for name, value in model.local_state().items()
        if id(by_name.get(name)) not in trained
    }
    return {
        "module": others,
        BUFFER_NAMES: [_PREFIX + name for name, _ in module.named_buffers() if name not in transient],
        PARAM_SHAPES: [OrderedDict((_PREFIX + name, p.shape) for name, p in group) for group in groups],
        "names": [_PREFIX + name for name in model.names_of_state()],
        "aliases": aliases,
    }


def _own_flat(
    parameter: nn.Parameter, name: str, model: Any, optimizer: Any, shard: int, num_shards: int
) -> Tensor:
    """This shard's part of a weight, as the optimizer has it."""
    updated = model.replicas.updated_parts
    whole = whole_of(parameter)
    if optimizer is not None and updated is not None and updated.keeps_masters:
        own = parts_of(model, optimizer, only=parameter).get(name, {})
        masters = [{name: {MASTER: own[MASTER]}}] if MASTER in own else [{}]
        found: Entries = put_together(m for each in allgather(masters, CommGroup.DP_GROUP) for m in each)
        whole = found[name][MASTER] if name in found else whole
    part = flat_part(whole, shard, num_shards).cpu()
    return part if part.dtype is torch.float64 else part.float()


def _state_of(run: ScriptRun, model: Any, optimizer: Any) -> dict[str, Any]:
    """The optimizer's state of this rank's rows, but for the weights."""
    entries = parts_of(model, optimizer)
    updated = model.replicas.updated_parts
    if updated is not None and updated.num_parts > 1:  # replicas of the shards share it besides
        entries = put_together(allgather(entries, CommGroup.DP_GROUP)) if run.mesh.data > 1 else entries
        entries = entries if run.data_rank % run.mesh.shard == 0 else {}
    elif run.mesh.tensor > 1:
        entries = merged(allgather(entries, CommGroup.TP_GROUP))
    saved = {
        name: {key: _as_plain(value) for key, value in entry.items() if key != MASTER}
        for name, entry in entries.items()
    }
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    return {"entries": saved, "param_groups": groups, "names": optimizer.names_here_by_group()}


def _as_plain(value: Any) -> Any:
    """A value in a form that files are read in without knowing any class."""
    if not isinstance(value, Part):
        return value
    boxes = [(box.offset, box.shape) for box in value.boxes]
    return {"elements": value.elements, "whole": value.whole, "boxes": boxes}


# ---- loading ----


def weights_in(folder: Path, stage: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of a partition of the model, under the names of the user's module."""
    path = folder / f"model_{stage}.pt"
    described = load_file(path, "cpu", mmap=True)
    shards = [load_file(file, "cpu", mmap=True) for file in shard_files(folder, stage)]
    flats = [shard["fp32_flat_groups"] for shard in shards]
    counts = {shard["partition_count"] for shard in shards}
    if counts != {len(shards)}:
        raise CorruptCheckpointError(
            f"{folder} has {len(shards)} files of shards for {path.name}, and they say that there are "
            f"{', '.join(map(str, sorted(counts)))}."
        )
    found = dict(described["module"])
    found.update(parameters_in(flats, described[PARAM_SHAPES], source=str(folder)))
    for name, first in described.get("aliases", {}).items():
        if first in found:
            found[name] = found[first]
    ordered = [name for name in described.get("names", found) if name in found]
    return {name.removeprefix(_PREFIX): found[name] for name in ordered}, described


def optimizer_state_in(
    folder: Path, stage: int, weights: Mapping[str, Tensor], *, with_state: bool
) -> dict[str, Any] | None:
    """The state of the optimizer of a partition; None where it was not saved."""
    shards = [load_file(file, "cpu", mmap=True) for file in shard_files(folder, stage)]
    states = [shard["optimizer_state"] for shard in shards if "optimizer_state" in shard]
    if not states:
        return None
    entries: Entries = put_together(_from_plain(state["entries"]) for state in states) if with_state else {}
    names = [name for group in states[0]["names"] for name in group]
    numbers = iter(range(len(names)))
    groups = [
        {**options, "params": [next(numbers) for _ in group]}
        for options, group in zip(states[0]["param_groups"], states[0]["names"], strict=True)
    ]
    return {
        "state": {number: entries[name] for number, name in enumerate(names) if name in entries},
        "param_groups": groups,
        "parameter_names": names,
        "fp32_master_params": {number: weights[name] for number, name in enumerate(names) if name in weights},
    }


def _from_plain(entries: Mapping[str, Mapping[str, Any]]) -> Entries:
    return {
        name: {key: _part(value) if isinstance(value, dict) else value for key, value in entry.items()}
        for name, entry in entries.items()
    }


def _part(value: Mapping[str, Any]) -> Part:
    boxes = tuple(Box(tuple(offset), tuple(shape)) for offset, shape in value["boxes"])
    return Part(value["elements"], tuple(value["whole"]), boxes)


def shard_files(folder: Path, stage: int) -> list[Path]:
    """Files of the shards of a partition, in their order."""
    several = (folder / "model_1.pt").exists()
    start = f"optimizer_{stage}_" if several else "optimizer_"
    found = {
        int(number): path
        for path in folder.glob(f"{start}*.pt")
        if (number := path.stem.removeprefix(start)).isdigit()
    }
    if sorted(found) != list(range(len(found))) or not found:
        raise CorruptCheckpointError(
            f"{folder} has the shards {sorted(found)} of partition {stage}, and they are counted from 0 "
            "without a gap: files are missing."
        )
    return [found[number] for number in sorted(found)]
