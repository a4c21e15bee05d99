"""Copies what a rank saves at one moment, so that training continues during the write.

::

    end of step k      copies of the tensors of this rank      (memory to memory; the only wait)
    step k + 1 ...     a thread writes the copies
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint.boxes import Box
from shardwright.checkpoint.saved import TensorPart
from shardwright.checkpoint.tensor_index import MODEL
from shardwright.errors import CheckpointError
from shardwright.torch.checkpoints.encoded import encode
from shardwright.torch.checkpoints.extra_states import own_extra_states
from shardwright.torch.checkpoints.own_parts import OwnPart, model_parts, optimizer_parts
from shardwright.torch.checkpoints.random_states import generator_states
from shardwright.torch.checkpoints.remade_buffers import remade_buffers
from shardwright.torch.checkpoints.stored import stored
from shardwright.torch.model.distributed_model import DistributedModel
from shardwright.torch.optimizer.distributed_optimizer import DistributedOptimizer
from shardwright.torch.script_run import ScriptRun
from shardwright.torch.tensor_parallel.parts import all_elements

__all__ = ["RankDocument", "Snapshot", "optimizer_prefix", "take_snapshot"]


@dataclass(slots=True, kw_only=True)
class RankDocument:
    """The JSON that a rank saves beside its parts of tensors.

    Attributes:
        extra_states: of the modules that it stands for, by name.
        optimizers: for each: ``groups``, a list of their options; ``members``, names of their parameters on
            this rank; ``others``, by parameter and key, what its
            state has that is no tensor.
        loss_scale: of ``fp16``; None without.
        states: of schedulers, samplers and the like, by name.
        buffers: of those of this rank that are others now what they were at first, see `remade_buffers`.
    """

    random: Any
    extra_states: dict[str, Any]
    optimizers: list[dict[str, Any]]
    loss_scale: dict[str, Any] | None
    states: dict[str, Any]
    buffers: dict[str, list[Any] | None]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A rank's part of a checkpoint.

    Attributes:
        parameters: full names of the tensors that are parameters of the model.
    """

    parts: list[TensorPart]
    document: RankDocument
    parameters: frozenset[str]


def optimizer_prefix(number: int) -> str:
    """Of the names of the tensors of an optimizer: the first wrapped one, the second, ..."""
    return "optimizer/" if number == 0 else f"optimizer{number + 1}/"


def take_snapshot(
    context: ScriptRun,
    model: DistributedModel,
    states: Mapping[str, Any],
    *,
    alike: Mapping[str, bool],
    copies: bool,
) -> Snapshot:
    """Takes what this rank has of the run."""
    own: list[OwnPart] = [*model_parts(model)]
    for number, optimizer in enumerate(context.optimizers):
        own += optimizer_parts(model, optimizer, prefix=optimizer_prefix(number))
    extra: dict[str, Tensor] = {}
    rank = f"{context.rank:05}"
    own_state = {name: f"state/{name}" if alike[name] else f"state/{name}@{rank}" for name in states}
    document = RankDocument(
        random=encode(generator_states(context.device), name=f"random/{rank}", tensors=extra),
        extra_states={
            name: encode(state, name=f"extra_state/{name}", tensors=extra)
            for name, state in own_extra_states(model).items()
        },
        optimizers=[
            _optimizer_document(context, model, optimizer, optimizer_prefix(number), extra)
            for number, optimizer in enumerate(context.optimizers)
        ],
        loss_scale=None if model.scaling is None else asdict(model.scaling.scaler),
        states={name: encode(state, name=own_state[name], tensors=extra) for name, state in states.items()},
        buffers=remade_buffers(model),
    )
    parts = [part for each in own for part in _parts_of(each, copies=copies)]
    for name, tensor in extra.items():
        box = Box.whole(tensor.shape)
        content = stored(_copy(tensor) if copies else tensor)
        parts.append(TensorPart(name, whole=tuple(tensor.shape), box=box, stored=content))
    parameters = frozenset(f"{MODEL}{name}" for name, _ in model.local_named_parameters())
    return Snapshot(parts, document, parameters)


def _parts_of(own: OwnPart, *, copies: bool) -> list[TensorPart]:
    tensor = _copy(own.tensor) if copies else own.tensor.detach()
    flat = tensor.reshape(-1)
    return [
        TensorPart(own.name, whole=own.whole, box=box, stored=stored(elements.reshape(box.shape)))
        for box, elements in zip(own.boxes, torch.split(flat, [box.numel for box in own.boxes]), strict=True)
    ]


def _copy(tensor: Tensor) -> Tensor:
    """On the CPU, in memory of its own."""
    made = torch.empty(tensor.shape, dtype=tensor.dtype)
    return made.copy_(tensor.detach())


def _optimizer_document(
    context: ScriptRun,
    model: DistributedModel,
    optimizer: DistributedOptimizer,
    prefix: str,
    tensors: dict[str, Tensor],
) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in model.get_module().named_parameters()}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    shared: dict[str, Tensor] = {}  # options that are tensors: every rank has them, the first one saves them
    others: dict[str, dict[str, Any]] = {}
    for parameter, values in optimizer.state.items():
        name = names.get(id(parameter))
        if name is None or not isinstance(values, Mapping):
            raise CheckpointError(
                f"the state of {type(optimizer.optimizer).__name__} has {str(parameter)[:40]!r}, which is no "
                "parameter of the model, and cannot be saved. Keep it in a parameter group."
            )
        plain = all_elements({key: value for key, value in values.items() if not isinstance(value, Tensor)})
        if plain and context.is_first_holder and model.counts_here(name):
            others[name] = encode(plain, name=f"{prefix}{name}/other", tensors=tensors)
    encoded_groups = encode(groups, name=f"{prefix}groups", tensors=shared)
    if context.rank == 0:
        tensors.update(shared)
    members = [
        [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
        for group in optimizer.param_groups
    ]
    return {"groups": encoded_groups, "members": members, "others": others}
