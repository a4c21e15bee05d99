"""What an optimizer knows of each parameter, by the name of the parameter: taken apart and put together.

Ranks have the state of different parameters, or different elements of the state of one. Here it is whole, or
what a rank has of it::

    whole     {"layer.weight": {"step": ..., "exp_avg": all elements}}
    a part    the same elements, where they lie in the whole, and how large that is
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.checkpoint.boxes import Box, covered_once
from shardwright.errors import CheckpointError
from shardwright.torch.checkpoints.own_loading import own_elements
from shardwright.torch.checkpoints.own_parts import MASTER, kept_here
from shardwright.torch.model.distributed_model import DistributedModel
from shardwright.torch.optimizer.distributed_optimizer import DistributedOptimizer
from shardwright.torch.tensor_parallel.divide import placed_like

__all__ = ["MASTER", "Entries", "Part", "entries_in", "merged", "own_part", "parts_of", "put_together"]

Entries = dict[str, dict[str, Any]]
"""By name of the parameter and by key; `MASTER` is the key of its copy in float32."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a tensor of the state.

    Attributes:
        boxes: where they lie in it, one behind the other.
    """

    elements: Tensor
    whole: tuple[int, ...]
    boxes: tuple[Box, ...]


def parts_of(
    model: DistributedModel,
    optimizer: DistributedOptimizer,
    *,
    only: nn.Parameter | None = None,
    names: Mapping[int, str] | None = None,
) -> Entries:
    """What this rank has of an optimizer's state: `Part` in the place of tensors that ranks share.

    Args:
        names: by the id of what it updates; None for those of the model's parameters.
    """
    if names is None:
        names = {id(parameter): name for name, parameter in model.get_module().named_parameters()}
    found: Entries = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if only is not None and parameter is not only:
                continue
            if id(parameter) not in names:
                raise CheckpointError(
                    f"the optimizer updates a tensor of the shape {tuple(parameter.shape)} that is no "
                    "parameter of the model, so that its state has no name. Save it with local_state_dict(), "
                    "on every rank."
                )
            entry = {
                key: _part(model, optimizer, parameter, key, value)
                for key, value in _values(model, optimizer, parameter)
            }
            if entry:
                found[names[id(parameter)]] = entry
    return found


def own_part(
    model: DistributedModel, optimizer: DistributedOptimizer, parameter: nn.Parameter, key: str, value: Any
) -> Any:
    """What this rank keeps of something in the state of a parameter, of which all elements are there."""
    if not isinstance(value, Tensor) or not value.dim() or value.shape != parameter.shape:
        return value
    if not optimizer.sees_rows and key != MASTER:
        return placed_like(value, parameter)
    own = own_elements(model, parameter, dtype=value.dtype, read=lambda box: value[box.slices])
    return value if own is None else own


def merged(of_ranks: Sequence[Entries]) -> Entries:
    """What several ranks have, as one of them would have it."""
    found: Entries = {}
    pieces: dict[tuple[str, str], list[Part]] = {}
    for entries in of_ranks:
        for name, values in entries.items():
            for key, value in values.items():
                found.setdefault(name, {}).setdefault(key, value)
                if isinstance(value, Part):
                    pieces.setdefault((name, key), []).append(value)
    for (name, key), parts in pieces.items():
        once = {part.boxes: part for part in parts}  # what ranks do not share, all of them have
        elements = torch.cat([part.elements for part in once.values()])
        found[name][key] = Part(elements, parts[0].whole, tuple(box for boxes in once for box in boxes))
    return found


def put_together(parts: Iterable[Entries]) -> Entries:
    """The whole state, from what ranks have of it."""
    pieces: dict[tuple[str, str], list[Part]] = {}
    whole: Entries = {}
    for entries in parts:
        for name, values in entries.items():
            for key, value in values.items():
                if isinstance(value, Part):
                    pieces.setdefault((name, key), []).append(value)
                    value = None  # its place among the keys
                whole.setdefault(name, {}).setdefault(key, value)
    for (name, key), found in pieces.items():
        whole[name][key] = _joined(f"{name}/{key}", found)
    return whole


def _joined(name: str, parts: Sequence[Part]) -> Tensor:
    once = {part.boxes: part for part in parts if part.boxes}  # replicas have the same
    boxes = [box for key in once for box in key]
    if not covered_once(parts[0].whole, boxes):
        have = sum(box.numel for box in boxes)
        raise CheckpointError(
            f"the ranks have {have} elements of {name}, which has the shape {parts[0].whole}: not all, or "
            "some of them twice. Call state_dict() on all ranks, between two steps."
        )
    joined = parts[0].elements.new_empty(parts[0].whole)
    for part in once.values():
        for box, elements in zip(
            part.boxes, torch.split(part.elements, [box.numel for box in part.boxes]), strict=True
        ):
            joined[box.slices] = elements.view(box.shape)
    return joined


def _values(
    model: DistributedModel, optimizer: DistributedOptimizer, parameter: nn.Parameter
) -> Iterator[tuple[str, Any]]:
    state: Mapping[str, Any] = optimizer.state.get(parameter, {})
    yield from state.items()
    updated = model.replicas.updated_parts
    master = None if updated is None else updated.master(parameter)
    if master is not None:
        yield MASTER, master


def _part(
    model: DistributedModel, optimizer: DistributedOptimizer, parameter: nn.Parameter, key: str, value: Any
) -> Any:
    if not isinstance(value, Tensor):
        return value
    kept = kept_here(model, optimizer, parameter, key, value)
    if kept.is_whole:
        return kept.tensor.detach().to("cpu", copy=True)
    pieces = kept.pieces()
    elements = torch.cat([kept.tensor.new_empty(0), *(own.reshape(-1) for _, own in pieces)])
    return Part(elements.detach().to("cpu"), kept.whole, tuple(box for box, _ in pieces))


def entries_in(state: Mapping[str, Any], masters: Mapping[int, Tensor], names: Sequence[str]) -> Entries:
    """What a state in PyTorch's format has of each parameter."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    if len(numbers) != len(names):
        raise CheckpointError(
            f"the state is of an optimizer of {len(numbers)} parameters, and this one has {len(names)}. "
            "Make the optimizer as it was when it was saved."
        )
    found: Entries = {}
    for number, name in zip(numbers, names, strict=True):
        entry = dict(state["state"].get(number, {}))
        if number in masters:
            entry[MASTER] = masters[number]
        if entry:
            found[name] = entry
    return found
