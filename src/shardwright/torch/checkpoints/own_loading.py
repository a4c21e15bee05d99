"""Loads this rank's share of a saved model and optimizer, whatever layout saved them."""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.checkpoint.boxes import Box
from shardwright.checkpoint.saved import SavedCheckpoint
from shardwright.checkpoint.tensor_index import MODEL
from shardwright.errors import CheckpointError
from shardwright.text import shortened
from shardwright.torch._private.modules import non_persistent_buffers
from shardwright.torch.checkpoints.own_parts import (
    MASTER,
    box_of_rows,
    boxes_of_update,
    parameter_and_key,
    sharded_of,
    shared_spec,
)
from shardwright.torch.checkpoints.state_dict_files import dtype_of, read_into, read_part
from shardwright.torch.model.distributed_model import DistributedModel
from shardwright.torch.optimizer.distributed_optimizer import DistributedOptimizer
from shardwright.torch.parameters.parameter_kinds import is_low
from shardwright.torch.tensor_parallel.divide import divided_alike, in_whole
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, local_of
from shardwright.torch.tensor_parallel.spec import Spec

WEIGHTS_ALONE = "take the weights alone: shardwright ckpt export, and ckpt import for a new run."

_MOST_NAMES = 5


def check_fits(
    model: DistributedModel,
    saved: SavedCheckpoint,
    *,
    strict: bool = True,
    remade: Collection[str] = (),
) -> None:
    own = {name: tensor for name, tensor, _ in _saved_tensors(model, saved)}
    theirs = {
        name.removeprefix(MODEL): entry.shape
        for name, entry in saved.index.tensors.items()
        if name.startswith(MODEL)
    }
    known = own.keys() | _other_names(model.get_module()) | set(remade)
    problems = [
        f"{len(names)} tensors are only {where}: {shortened(sorted(names), most=_MOST_NAMES)}."
        for where, names in (
            ("in the checkpoint", theirs.keys() - known),
            ("in the model", {name for name, _, full in _saved_tensors(model, saved) if not full}),
        )
        if names and strict
    ]
    for _, tensor, full in _saved_tensors(model, saved):
        name = full.removeprefix(MODEL)
        shape = theirs.get(name) if full else None
        if shape is not None and shape != tuple(tensor.shape) and name not in remade:
            problems.append(f"{name} has the shape {shape} there, and {tuple(tensor.shape)} here.")
    if problems:
        shown = "\n  ".join(problems[: _MOST_NAMES + 2])
        raise CheckpointError(
            f"{saved.path} is of another model:\n  {shown}\nBuild the model as it was when it was saved, "
            "load the names that match by resume(strict=False), or begin a new run (shardwright run --fresh)."
        )


def load_model(model: DistributedModel, saved: SavedCheckpoint) -> None:
    """Fills parameters and persistent buffers; every rank does, between two steps."""
    for _, tensor, full in _saved_tensors(model, saved):
        sharded = sharded_of(model, tensor)
        if not full:
            continue
        if sharded is not None:
            _read_own(sharded.rows, box_of_rows(sharded), partial(read_part, saved, full), sharded.spec)
        elif isinstance(tensor, DividedTensor):
            part = local_of(tensor).detach()
            read = partial(read_part, saved, full)
            _read_own(part, Box.whole(part.shape), read, shared_spec(model, tensor))
        elif not tensor.is_meta:
            read_into(tensor.detach(), saved, full)


def _saved_tensors(model: DistributedModel, saved: SavedCheckpoint) -> Iterator[tuple[str, Tensor, str]]:
    """Name of each tensor of the model, the tensor, and its name in the checkpoint; "" where it has none.

    A tensor of several names may have been saved under any of them.
    """
    transient = non_persistent_buffers(model.get_module())
    names: dict[int, list[str]] = {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in (
        *model.get_module().named_parameters(remove_duplicate=False),
        *model.get_module().named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), []).append(name)
        tensors[name] = tensor
    for aliases in names.values():
        if aliases[0] not in transient:
            full = next((f"{MODEL}{n}" for n in aliases if f"{MODEL}{n}" in saved.index.tensors), "")
            yield aliases[0], tensors[aliases[0]], full


def _other_names(module: nn.Module) -> set[str]:
    """All names of parameters and buffers, also of those that have several."""
    return {
        name
        for name, _ in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
    }


def load_optimizer_state(
    model: DistributedModel,
    optimizer: DistributedOptimizer,
    saved: SavedCheckpoint,
    *,
    others: Mapping[str, Mapping[str, Any]],
    prefix: str = "optimizer/",
) -> None:
    """Gives an optimizer the state of the parameters of this rank; options of its groups stay."""
    names = {id(parameter): name for name, parameter in model.get_module().named_parameters()}
    all_names = set(names.values())
    keys: dict[str, list[str]] = {}
    for full in saved.index.tensors:
        if full.startswith(prefix):
            name, key = parameter_and_key(full.removeprefix(prefix), all_names)
            if key.startswith("other."):  # in a container, which `others` describes
                continue
            keys.setdefault(name, []).append(key)
    state: dict[int, dict[str, Any]] = {}
    masters: list[tuple[nn.Parameter, Tensor]] = []
    number = 0
    numbered = []
    for group in optimizer.param_groups:
        numbered.append({**group, "params": [number + i for i in range(len(group["params"]))]})
        for parameter in group["params"]:
            name = names[id(parameter)]
            values = dict(others.get(name, {}))
            for key in keys.get(name, ()):
                in_parts = optimizer.sees_rows or key == MASTER
                own = _own_value(model, parameter, saved, f"{prefix}{name}/{key}", in_parts=in_parts)
                values[key] = optimizer.kept(key, own)
            if MASTER not in values and _is_rounded(model, parameter, saved, name):  # imported
                values[MASTER] = _own_value(model, parameter, saved, f"{MODEL}{name}", in_parts=True)
            if MASTER in values:
                masters.append((parameter, values.pop(MASTER)))
            if values:
                state[number] = values
            number += 1
    optimizer.load_state_dict({"state": state, "param_groups": numbered})
    updated = model.replicas.updated_parts
    for parameter, master in masters if updated is not None and updated.keeps_masters else ():
        assert updated is not None
        updated.set_master(parameter, master)


def _is_rounded(model: DistributedModel, parameter: nn.Parameter, saved: SavedCheckpoint, name: str) -> bool:
    """Whether a parameter in 16 bits is updated in float32, as the checkpoint has it."""
    updated, entry = model.replicas.updated_parts, saved.index.tensors.get(f"{MODEL}{name}")
    wanted = updated is not None and updated.keeps_masters and is_low(parameter)
    return wanted and entry is not None and dtype_of(entry.dtype) is torch.float32


def _own_value(
    model: DistributedModel, parameter: nn.Parameter, saved: SavedCheckpoint, name: str, *, in_parts: bool
) -> Tensor:
    """Cuts this rank's rows or range out of a tensor of the state that has the shape of the whole."""
    entry = saved.entry(name)
    sharded = sharded_of(model, parameter)
    cut = in_parts or (sharded is not None and boxes_of_update(model, parameter) is None)
    if not cut or not entry.shape or entry.shape != tuple(parameter.shape):
        return read_part(saved, name)
    read = partial(read_part, saved, name)
    own = own_elements(model, parameter, dtype=dtype_of(entry.dtype), read=read)
    if own is None:
        return read_part(saved, name)
    # Norms and sums over rows are rounded otherwise than those of the whole.
    return own if in_parts or sharded is None else sharded.around(own)


def own_elements(
    model: DistributedModel, parameter: nn.Parameter, *, dtype: torch.dtype, read: Callable[[Box], Tensor]
) -> Tensor | None:
    """This rank's rows, or range, of something with the shape of a parameter; None where it has all."""
    sharded, spec = sharded_of(model, parameter), shared_spec(model, parameter)

    def own(box: Box) -> Tensor:
        part = torch.empty(box.shape, dtype=dtype)
        _read_own(part, box, read, spec)
        return part

    boxes = boxes_of_update(model, parameter)
    if boxes is not None:
        flat = [own(box).reshape(-1) for box in boxes]
        return torch.cat(flat) if flat else torch.empty(0, dtype=dtype)
    if sharded is not None:
        return own(box_of_rows(sharded))
    if isinstance(parameter, DividedTensor):
        part = torch.empty_like(local_of(parameter), dtype=dtype, requires_grad=False)
        _read_own(part, Box.whole(part.shape), read, spec)
        return divided_alike(part, parameter)
    return None


def _read_own(target: Tensor, box: Box, read: Callable[[Box], Tensor], spec: Spec | None) -> None:
    """Fills a tensor with a box of what this rank has of a whole one."""
    places = [(box, target)] if spec is None else in_whole(box, target, spec)
    with torch.no_grad():
        for place, own in places:
            own.copy_(read(place))


def refuse_another_kind(
    path: Path, saved: Mapping[str, Any], group: Mapping[str, Any], optimizer: Optimizer
) -> None:
    """Refuses the options of another optimizer: its state would be of no use, and that of this one missing.

    Those that a scheduler, or another version of PyTorch, has added are on one side alone.
    """
    passing = {"params", "initial_lr", "max_lr", "min_lr"}
    theirs, own = saved.keys() - group.keys() - passing, group.keys() - saved.keys() - passing
    if theirs and own:
        raise CheckpointError(
            f"{path} has an optimizer with {', '.join(sorted(theirs))}, and this one "
            f"({type(optimizer).__name__}) has {', '.join(sorted(own))} instead. Make the optimizer as it "
            f"was; or {WEIGHTS_ALONE}"
        )
