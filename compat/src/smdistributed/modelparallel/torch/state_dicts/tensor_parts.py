"""Parts that ranks of a tensor-parallel group have of tensors, in states that each rank saves for itself.

::

    local_state_dict()    {"layer.weight": this rank's part, ...,
                           "tensor_parts": {"rank": 0, "ranks": 2,
                                            "cuts": {"layer.weight": "cut 0 (r0:4 r1:4)"}}}
    load_state_dict()     each rank gives its parts, and takes its own of the whole tensors

The entry ``tensor_parts`` is that of `sw.DistributedOptimizer`.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shardwright.errors import CheckpointError
from shardwright.placement import Cut
from shardwright.torch.optimizer.optimizer_state import PARTS, parts_entry
from shardwright.torch.tensor_parallel.divide import cut_of, joined
from shardwright.torch.tensor_parallel.divided_tensor import local_of
from smdistributed.modelparallel.comm import allgather
from smdistributed.modelparallel.groups import CommGroup
from smdistributed.modelparallel.torch.state_mod import current_run

MASTERS = "fp32_master_params"
"""Key of a state: copies in float32 of parameters in 16 bits, by their numbers."""


def as_parts(tensors: Mapping[Any, Any]) -> tuple[dict[Any, Any], dict[Any, str]]:
    """What this rank has of tensors, and how those are cut of which it has a part."""
    cuts = {
        name: str(cut)
        for name, value in tensors.items()
        if isinstance(value, Tensor) and (cut := cut_of(value)) is not None
    }
    return {name: local_of(value) if name in cuts else value for name, value in tensors.items()}, cuts


def as_whole(parts: Mapping[Any, Any], entry: Mapping[str, Any] | None) -> dict[Any, Any]:
    """The whole tensors; collective over the tensor-parallel group, if some are cut."""
    if not entry:
        return dict(parts)
    run = current_run()
    if entry["ranks"] != run.mesh.tensor:
        raise CheckpointError(_other_degree(entry["ranks"], run.mesh.tensor))
    if entry["rank"] != run.tensor_rank:
        raise CheckpointError(
            f"the state has the parts of tp_rank {entry['rank']}, and this is tp_rank {run.tensor_rank}. "
            "Load on each rank what it has saved."
        )
    read = {name: Cut.parse(text) for name, text in entry["cuts"].items()}
    of_ranks = allgather({name: parts[name] for name in read}, CommGroup.TP_GROUP)
    whole = {name: joined([each[name] for each in of_ranks], cut) for name, cut in read.items()}
    return {**parts, **whole}


def entries_as_parts(state: dict[str, Any]) -> dict[str, Any]:
    """The local state of an optimizer, with this rank's parts of tensors that a group shares."""
    found, cuts = {}, {}
    for number, entry in _with_masters(state).items():
        found[number], of_entry = as_parts(entry)
        if of_entry:
            cuts[number] = of_entry
    return {**_apart(state, found), **({PARTS: parts_entry(cuts)} if cuts else {})}


def entries_as_whole(state: dict[str, Any]) -> dict[str, Any]:
    """The same with whole tensors; collective over the tensor-parallel group, if some are cut."""
    entry = state.pop(PARTS, None)
    if not entry:
        return state
    entries = _with_masters(state)
    flat = {(number, key): value for number, entry in entries.items() for key, value in entry.items()}
    cuts = {(number, key): cut for number, each in entry["cuts"].items() for key, cut in each.items()}
    whole = as_whole(flat, {**entry, "cuts": cuts})
    found: dict[Any, dict[str, Any]] = {number: {} for number in entries}
    for (number, key), value in whole.items():
        found[number][key] = value
    return _apart(state, found)


def _with_masters(state: Mapping[str, Any]) -> dict[Any, dict[str, Any]]:
    """The entries of a state, with the copies in float32 among them."""
    masters = state.get(MASTERS, {})
    numbers = dict.fromkeys([*state["state"], *masters])
    return {
        number: {
            **state["state"].get(number, {}),
            **({MASTERS: masters[number]} if number in masters else {}),
        }
        for number in numbers
    }


def _apart(state: Mapping[str, Any], entries: Mapping[Any, Mapping[str, Any]]) -> dict[str, Any]:
    """A state with these entries: what `_with_masters` puts together is apart again."""
    masters = {number: entry[MASTERS] for number, entry in entries.items() if MASTERS in entry}
    others = {number: {k: v for k, v in entry.items() if k != MASTERS} for number, entry in entries.items()}
    others = {number: entry for number, entry in others.items() if entry or number in state["state"]}
    return {**state, "state": others, **({MASTERS: masters} if masters else {})}


def _other_degree(there: int, here: int) -> str:
    return (
        f"the state has parts of tensors that {there} ranks shared, and tensor_parallel_degree is {here} "
        "now. Set it so; or save a full one: state_dict(), or smp.save_checkpoint(..., partial=False)."
    )
