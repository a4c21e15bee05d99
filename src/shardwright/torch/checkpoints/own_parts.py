"""Chooses which parts of the model and optimizer this rank saves.

Exactly one rank saves each element: the first rank that holds it in its replica. Replicas with equal copies
take turns, so that all disks and links get about the same load::

    rank 0, stage 0, replica 0    layers.0.weight            layers.1.bias
    rank 1, stage 0, replica 1    layers.0.bias              layers.1.weight
    rank 2, stage 1, replica 0    layers.2.weight   ...

Where replicas shard parameters, each rank saves its rows; where they shard optimizer state, its range.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod

from torch import Tensor, nn

from shardwright.checkpoint.boxes import Box, boxes_of_range
from shardwright.errors import CheckpointError
from shardwright.torch._private import non_persistent_buffers
from shardwright.torch.model.distributed_model import DistributedModel
from shardwright.torch.optimizer.distributed_optimizer import DistributedOptimizer
from shardwright.torch.parameters.sharded_tensor import ShardedTensor
from shardwright.torch.script_run import script_run
from shardwright.torch.sharding.sharded_parameter import ShardedParameter

__all__ = [
    "MASTER",
    "OwnPart",
    "box_of_rows",
    "boxes_of_update",
    "has_rows",
    "model_parts",
    "optimizer_parts",
    "sharded_of",
]

MASTER = "#master"
"""Key under which the copy in float32 of a parameter in 16 bits is saved, beside the optimizer's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPart:
    """Elements of a tensor that this rank has.

    Attributes:
        name: full name of the tensor in the checkpoint.
        tensor: the elements, where they are now.
        whole: shape of the whole tensor.
        boxes: where they lie in it, one behind the other.
    """

    name: str
    tensor: Tensor
    whole: tuple[int, ...]
    boxes: tuple[Box, ...]


def model_parts(model: DistributedModel, *, prefix: str = "model/") -> list[OwnPart]:
    """What this rank saves of the parameters and persistent buffers of the model.

    Args:
        model: between two steps, and with memory.
        prefix: of the names.
    """
    transient = non_persistent_buffers(model.get_module())
    turns = _Turns()
    parts = []
    for name, tensor in (*model.get_module().named_parameters(), *model.get_module().named_buffers()):
        if name in transient or not model.counts_here(name):
            continue
        sharded = sharded_of(model, tensor)
        if turns.is_mine(tensor.numel(), _Have.ALL if sharded is None else _Have.SAME_ROWS):
            own = tensor.detach() if sharded is None else sharded.rows
            parts.append(_part(f"{prefix}{name}", own, tuple(tensor.shape), sharded))
    return parts


def optimizer_parts(
    model: DistributedModel, optimizer: DistributedOptimizer, *, prefix: str = "optimizer/"
) -> list[OwnPart]:
    """What this rank saves of the tensors of an optimizer's state: named by parameter, then by key.

    Args:
        model: whose parameters it updates.
        optimizer: of this rank.
        prefix: of the names.
    """
    turns = _Turns()
    names = {id(parameter): name for name, parameter in model.get_module().named_parameters()}
    parts = []
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        name = _name_of(parameter, names)
        if not model.counts_here(name):
            continue
        sharded = sharded_of(model, parameter)
        for key, kept in _tensors(model, optimizer, parameter):
            value = kept.local if isinstance(kept, ShardedTensor) else kept
            own = _range(f"{prefix}{name}/{key}", value, parameter, model)
            if own is not None:
                if sharded is not None or turns.is_mine(value.numel(), _Have.SHARD_GROUP):
                    parts.append(own)
                continue
            rows = sharded if has_rows(optimizer, sharded, key, kept) else None
            whole = tuple(parameter.shape if rows is not None else value.shape)
            if turns.is_mine(value.numel(), _Have.ALL if rows is None else _Have.SAME_ROWS):
                parts.append(_part(f"{prefix}{name}/{key}", value, whole, rows))
    return parts


def _name_of(parameter: nn.Parameter, names: Mapping[int, str]) -> str:
    """Its name in the model.

    Raises:
        CheckpointError: it is not the model's.
    """
    if id(parameter) not in names:
        raise CheckpointError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the wrapped "
            "model's, and has no name to be saved by. Register it in the module that is wrapped, before "
            "DistributedModel, or leave its optimizer unwrapped."
        )
    return names[id(parameter)]


class _Have(Enum):
    """Who has the same elements as this rank, of the ranks with the same stage."""

    ALL = "all of them: nothing is shared"
    SAME_ROWS = "those of other shard groups: ranks of a shard group have different rows"
    SHARD_GROUP = "those of its shard group: replicas of it update different ranges"


class _Turns:
    """Which rank saves what several have: the one that has the least to do so far."""

    def __init__(self) -> None:
        mesh, data_rank = script_run().mesh, script_run().data_rank
        group, place = divmod(data_rank, mesh.shard)
        self._mine = {_Have.ALL: data_rank, _Have.SAME_ROWS: group, _Have.SHARD_GROUP: place}
        self._loads = {
            _Have.ALL: [0] * mesh.data,
            _Have.SAME_ROWS: [0] * (mesh.data // mesh.shard),
            _Have.SHARD_GROUP: [0] * mesh.shard,
        }

    def is_mine(self, numel: int, have: _Have) -> bool:
        """Takes a turn; all ranks with the same stage take the same ones.

        Args:
            numel: elements to save.
            have: who has them.
        """
        loads = self._loads[have]
        chosen = loads.index(min(loads))
        loads[chosen] += numel + 1  # so that empty ones take turns, too
        return chosen == self._mine[have]


def _tensors(
    model: DistributedModel, optimizer: DistributedOptimizer, parameter: nn.Parameter
) -> Iterator[tuple[str, Tensor]]:
    """What an optimizer keeps of a parameter: rows or a range of it, or all."""
    for key, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor):
            yield key, value
    updated = model.replicas.updated_parts
    master = None if updated is None else updated.master(parameter)
    if master is not None:
        yield MASTER, master


def has_rows(
    optimizer: DistributedOptimizer, sharded: ShardedParameter | None, key: str, value: Tensor
) -> bool:
    """Whether a tensor of the state has the rows that this rank keeps of a parameter, and not all.

    Shapes alone do not tell: what Adafactor keeps of the columns of a whole parameter may have that of the
    rows of a rank.

    Args:
        optimizer: whose state it is.
        sharded: the parameter; None where nothing of it is shared.
        key: in the state of the parameter.
        value: the tensor.
    """
    if sharded is None:
        return False
    is_local = optimizer.sees_rows or key == MASTER
    return isinstance(value, ShardedTensor) or (is_local and value.shape == sharded.rows.shape)


def sharded_of(model: DistributedModel, tensor: Tensor) -> ShardedParameter | None:
    """The rows of a parameter that this rank keeps; None where it keeps all of it."""
    sharding = model.replicas.sharding
    return None if sharding is None else sharding.parameters.get(id(tensor))


def _part(name: str, tensor: Tensor, whole: tuple[int, ...], sharded: ShardedParameter | None) -> OwnPart:
    """All of a tensor, or the rows that this rank keeps."""
    box = Box.whole(whole) if sharded is None else box_of_rows(sharded)
    return OwnPart(name=name, tensor=tensor, whole=whole, boxes=(box,))


def _range(
    name: str,
    value: Tensor,
    parameter: nn.Parameter,
    model: DistributedModel,
) -> OwnPart | None:
    """The range that this rank updates of what it has of a parameter; None where `value` is no such."""
    boxes = boxes_of_update(model, parameter)
    if boxes is None or value.shape != (sum(box.numel for box in boxes),):
        return None
    return OwnPart(name=name, tensor=value, whole=tuple(parameter.shape), boxes=boxes)


def box_of_rows(sharded: ShardedParameter) -> Box:
    """The rows that this rank keeps of a parameter that ranks share."""
    rows, whole = sharded.own_rows, tuple(sharded.parameter.shape)
    return Box((rows.start, *(0 for _ in whole[1:])), (len(rows), *whole[1:]))


def boxes_of_update(model: DistributedModel, parameter: nn.Parameter) -> tuple[Box, ...] | None:
    """The range that this rank updates of a parameter; None where it updates all that it has of it."""
    sharded, updated = sharded_of(model, parameter), model.replicas.updated_parts
    own = None if updated is None else updated.own_range(parameter if sharded is None else sharded.rows)
    if own is None:
        return None
    begin = 0 if sharded is None else sharded.own_rows.start * prod(parameter.shape[1:])
    return tuple(boxes_of_range(parameter.shape, begin + own.start, begin + own.stop))
