"""An optimizer's state by names of parameters, and the part of it that this rank has.

The positions are those of another run, whose model may have registered its parts in another order.

::

    state_dict()       {"state": {0: {"exp_avg": this rank's part, ...}, ...}, "param_groups": [...],
                        "tensor_parts": {"rank": 0, "ranks": 2,
                                         "cuts": {0: {"exp_avg": "cut 0 (r0:4 r1:4)", ...}, ...}}}
                        ("of_layers", too: {1: 2}, where fewer ranks than "ranks" share some of them)
    load_state_dict()  gives each rank its part again, also where a new plan cuts otherwise
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.errors import UsageError
from shardwright.placement import Cut
from shardwright.run.context import context, is_initialized
from shardwright.torch.optimizer.packed_tensor import unpacked
from shardwright.torch.tensor_parallel.divide import cut_of, placed_again, placed_like, tensor_group
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, local_of, whole


def state_by_name(
    saved: Mapping[str, Any], theirs: Sequence[str], mine: Sequence[Sequence[str]]
) -> dict[str, Any] | None:
    """The part of a saved state that some parameters need, in their order.

    >>> groups = [{"lr": 0.1, "params": [0, 1]}]
    >>> state_by_name({"state": {0: "of a", 1: "of b"}, "param_groups": groups}, ["a", "b"], [["b"]])
    {'state': {0: 'of b'}, 'param_groups': [{'lr': 0.1, 'params': [0]}]}
    """
    groups: list[dict[str, Any]] = saved["param_groups"]
    numbers = [(place, number) for place, group in enumerate(groups) for number in group["params"]]
    if len(groups) != len(mine) or len(numbers) != len(theirs):
        return None
    found = dict(zip(theirs, numbers, strict=True))
    wanted = [(place, name) for place, names in enumerate(mine) for name in names]
    if any(not name or name not in found or found[name][0] != place for place, name in wanted):
        return None
    state: dict[Any, Any] = {  # what it keeps beside its parameters
        key: value for key, value in saved["state"].items() if type(key) is not int
    }
    chosen = [{**group, "params": []} for group in groups]
    for now, (place, name) in enumerate(wanted):
        chosen[place]["params"].append(now)
        number = found[name][1]
        if number in saved["state"]:
            state[now] = saved["state"][number]
    return {**saved, "state": state, "param_groups": chosen}


def part_of_state() -> dict[str, int]:
    """This rank's part of a shared state; empty if none is shared."""
    if not is_initialized():
        return {}
    current = context()
    data, shard = current.data_rank, current.mesh.shard
    part = {"shard": data % shard, "shards": shard}
    if (num_updating := current.config.num_updating(current.mesh)) > 1:
        part |= {"replica": data // shard % num_updating, "replicas": num_updating}
    if current.mesh.share > 1:
        part |= {"tensor": current.tensor_rank, "tensors": current.mesh.share}
    return part if shard > 1 or part.get("replicas", 1) > 1 else {}


def refuse_other_part(theirs: dict[str, int] | None) -> None:
    """Refuses a state that another rank has saved."""
    mine = part_of_state()
    if theirs and mine and theirs != mine:
        raise UsageError(
            f"rank {context().rank} loads a state of the optimizer that is another part of it ({theirs}) "
            f"than it has here ({mine}): ranks share it. Save it on every rank, for example in a file with "
            "sw.rank() in its name, and load on each rank its own."
        )


def place_state(state: Any, parameter: nn.Parameter) -> None:
    """Leaves this rank its part of the state of a parameter that ranks share from now on."""
    if isinstance(parameter, DividedTensor) and parameter in state:
        for key, value in state[parameter].items():
            if isinstance(value, Tensor):
                state[parameter][key] = placed_like(value, parameter)


def load_state(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    parameters: Sequence[nn.Parameter],
    *,
    home: torch.device | None,
) -> None:
    """Loads a state in the types that it was saved in: PyTorch casts it to those of the parameters.

    Where its home is not with the parameters, it takes none of their memory.
    """
    optimizer.load_state_dict({**saved, "state": saved["state"] if home is None else {}})
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        values = saved["state"].get(number, {})
        if home is not None and values:
            optimizer.state[parameter] = {
                key: value.to(home, copy=True) if isinstance(value, Tensor) else value
                for key, value in values.items()
            }
        for key, value in values.items():
            now = optimizer.state[parameter].get(key)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype is not value.dtype:
                optimizer.state[parameter][key] = value.to(now.device).clone()


PARTS = "tensor_parts"


class _Part(NamedTuple):
    """What this rank has of a tensor, how ranks share it, and how many do."""

    local: Tensor
    cut: Cut
    num_ranks: int


def as_parts(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with this rank's parts in the place of tensors that ranks share."""
    found: dict[Any, Any] = {}
    cuts: dict[Any, dict[Any, str]] = {}
    num_ranks: dict[Any, int] = {}
    for number, values in state["state"].items():
        found[number] = values
        if not isinstance(values, Mapping):
            continue
        found[number] = own = {key: unpacked(value) for key, value in values.items()}
        for key, value in values.items():
            if isinstance(value, DividedTensor):
                cut = cut_of(value)
                own[key] = unpacked(whole(value) if cut is None else local_of(value))
                if cut is not None:
                    cuts.setdefault(number, {})[key] = str(cut)
                    num_ranks[number] = value._spec.group.num_ranks
    return {**state, "state": found, **({PARTS: parts_entry(cuts, num_ranks)} if cuts else {})}


def parts_entry(cuts: Mapping[Any, Any], num_ranks: Mapping[Any, int] | None = None) -> dict[str, Any]:
    """What a state with parts says of them, under `PARTS`: whose they are, and how ranks share the wholes."""
    run = context()
    found = {"rank": run.part_rank, "ranks": run.num_parts, "cuts": cuts}
    fewer = {number: each for number, each in (num_ranks or {}).items() if each != run.num_parts}
    return {**found, "of_layers": fewer} if fewer else found


def with_cuts(state: Mapping[str, Any], parts: Mapping[str, Any] | None) -> dict[str, Any]:
    """The same state, whose parts know how they are cut."""
    if not parts:
        return dict(state)
    here = (context().part_rank, context().num_parts) if is_initialized() else (0, 1)
    there = (parts["rank"], parts["ranks"])
    if here != there:
        raise UsageError(
            f"the state of the optimizer has the parts of rank {there[0]} of {there[1]} ranks that share "
            f"layers, and this is rank {here[0]} of {here[1]} (tensor_parallel_degree {here[1]}). Save it on "
            "every rank, for example in a file with sw.rank() in its name, and load on each its own. "
            "Checkpoints of sw.Checkpoints go with any degree."
        )
    found = dict(state["state"])
    for number, cuts in parts["cuts"].items():
        num_ranks = parts.get("of_layers", {}).get(number, parts["ranks"])
        found[number] = {
            key: _Part(value, Cut.parse(cuts[key]), num_ranks) if key in cuts else value
            for key, value in found[number].items()
        }
    return {**state, "state": found}


def placed(state: Mapping[str, Any], parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
    """The same state, shared like the parameters; collective over the ranks that share some."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    found = dict(state["state"])
    for number, parameter in zip(numbers, parameters, strict=False):
        values = found.get(number)
        if isinstance(values, Mapping):
            found[number] = {key: _placed(value, parameter) for key, value in values.items()}
    return {**state, "state": found}


def _placed(value: Any, parameter: nn.Parameter) -> Any:
    if isinstance(value, _Part):
        group = parameter._spec.group if isinstance(parameter, DividedTensor) else None
        if group is None or group.num_ranks != value.num_ranks:
            group = tensor_group(context().groups.with_parts(value.num_ranks))
        return placed_again(value.local.to(parameter.device), value.cut, parameter, group)
    return placed_like(value, parameter) if isinstance(value, Tensor) else value
