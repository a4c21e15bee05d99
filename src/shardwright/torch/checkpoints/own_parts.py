"""Chooses which parts of the model and optimizer this rank saves.

Exactly one rank saves each element: the first rank that holds it in its replica. Replicas with equal copies
take turns, so that all disks and links get about the same load::

    rank 0, stage 0, replica 0    layers.0.weight            layers.1.bias
    rank 1, stage 0, replica 1    layers.0.bias              layers.1.weight
    rank 2, stage 1, replica 0    layers.2.weight   ...

Where replicas shard parameters, each rank saves its rows; where they shard optimizer state, its range; where
ranks share layers, each saves its runs of a cut tensor, and one of them what is whole.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardwright.checkpoint.boxes import Box, boxes_of_range
from shardwright.checkpoint.saved import TensorPart
from shardwright.checkpoint.tensor_file import StoredTensor
from shardwright.checkpoint.tensor_index import MODEL
from shardwright.errors import CheckpointError
from shardwright.torch._private.modules import non_persistent_buffers
from shardwright.torch.checkpoints.state_dict_files import stored
from shardwright.torch.model.distributed_model import DistributedModel
from shardwright.torch.optimizer.distributed_optimizer import DistributedOptimizer
from shardwright.torch.parameters.sharded_tensor import ShardedTensor
from shardwright.torch.sharding.sharded_parameter import ShardedParameter
from shardwright.torch.startup import script_run
from shardwright.torch.tensor_parallel.divide import cut_of, in_whole
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, local_of, whole
from shardwright.torch.tensor_parallel.spec import Spec

MASTER = "#master"
"""Key under which the copy in float32 of a parameter in 16 bits is saved, beside the optimizer's state."""


Store = Callable[[Tensor], StoredTensor]
"""Gives the bytes of a tensor: a copy, where training goes on during the save."""


def parameter_and_key(name: str, parameters: Collection[str]) -> tuple[str, str]:
    """Of the name of a tensor of an optimizer; keys of other optimizers, and parameters, may have slashes.

    >>> parameter_and_key("a.b/m/v", {"a.b"}), parameter_and_key("a/b/m", {"a/b"})
    (('a.b', 'm/v'), ('a/b', 'm'))
    """
    parts = name.split("/")
    known = (n for n in range(len(parts) - 1, 0, -1) if "/".join(parts[:n]) in parameters)
    place = next(known, len(parts) - 1)
    return "/".join(parts[:place]), "/".join(parts[place:])


def model_parts(model: DistributedModel, store: Store = stored) -> list[TensorPart]:
    """The parts of the model's parameters and persistent buffers that this rank saves."""
    transient = non_persistent_buffers(model.get_module())
    turns = _Turns()
    parts: list[TensorPart] = []
    for name, tensor in (*model.get_module().named_parameters(), *model.get_module().named_buffers()):
        if name in transient or not model.counts_here(name):
            continue
        sharded, spec = sharded_of(model, tensor), shared_spec(model, tensor)
        have = _Have.ALL if sharded is None else _Have.SAME_ROWS
        if turns.is_mine(tensor.numel(), have, spec):
            own = local_of(tensor).detach() if sharded is None else sharded.rows
            box = Box.whole(own.shape) if sharded is None else box_of_rows(sharded)
            kept = Kept(own, tuple(tensor.shape), (box,), spec)
            parts += kept.stored(f"{MODEL}{name}", store)
    return parts


def optimizer_parts(
    model: DistributedModel,
    optimizer: DistributedOptimizer,
    store: Store = stored,
    *,
    prefix: str = "optimizer/",
) -> list[TensorPart]:
    """The parts of an optimizer's state that this rank saves: named by parameter, then by key."""
    turns = _Turns()
    names = {id(parameter): name for name, parameter in model.get_module().named_parameters()}
    parts: list[TensorPart] = []
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        name = _name_of(parameter, names)
        if not model.counts_here(name):
            continue
        for key, kept in _tensors(model, optimizer, parameter):
            own, have = _kept_here(model, optimizer, parameter, key, kept)
            if turns.is_mine(own.tensor.numel(), have, own.spec):
                parts += own.stored(f"{prefix}{name}/{key}", store)
    return parts


class Kept(NamedTuple):
    """A tensor of the model or of an optimizer's state, as this rank has it.

    Attributes:
        boxes: where they lie in the whole, or in the part of it that this rank has, one behind the other.
        spec: how ranks share the whole; None where they do not.
    """

    tensor: Tensor
    whole: tuple[int, ...]
    boxes: tuple[Box, ...]
    spec: Spec | None

    @property
    def is_whole(self) -> bool:
        return self.spec is None and self.boxes == (Box.whole(self.whole),)

    def pieces(self) -> list[tuple[Box, Tensor]]:
        """The elements with their places in the whole."""
        flat = torch.split(self.tensor.detach().reshape(-1), [box.numel for box in self.boxes])
        own = [(box, part.view(box.shape)) for box, part in zip(self.boxes, flat, strict=True)]
        if self.spec is None:
            return own
        return [piece for box, part in own for piece in in_whole(box, part, self.spec)]

    def stored(self, name: str, store: Store) -> list[TensorPart]:
        """The same as parts of the tensor of that name in the checkpoint."""
        return [TensorPart(name, whole=self.whole, box=box, stored=store(own)) for box, own in self.pieces()]


def kept_here(
    model: DistributedModel, optimizer: DistributedOptimizer, parameter: nn.Parameter, key: str, kept: Tensor
) -> Kept:
    """What this rank has of a tensor of the state of a parameter."""
    return _kept_here(model, optimizer, parameter, key, kept)[0]


def _kept_here(
    model: DistributedModel, optimizer: DistributedOptimizer, parameter: nn.Parameter, key: str, kept: Tensor
) -> "tuple[Kept, _Have]":
    """What this rank has of a tensor of the state, and who has the same."""
    if isinstance(kept, DividedTensor):
        if cut_of(kept) is None:
            kept = whole(kept)
        else:
            own = kept._local
            return Kept(own, tuple(kept.shape), (Box.whole(own.shape),), kept._spec), _Have.ALL
    value = kept.local if isinstance(kept, ShardedTensor) else kept
    shape, spec = tuple(parameter.shape), shared_spec(model, parameter)
    sharded, boxes = sharded_of(model, parameter), boxes_of_update(model, parameter)
    if boxes is not None and value.shape == (sum(box.numel for box in boxes),):
        have = _Have.SAME_RANGE if sharded is None else _Have.SAME_RANGE_OF_ROWS
        return Kept(value, shape, boxes, spec), have
    if sharded is not None and has_rows(optimizer, sharded, key, kept):
        return Kept(value, shape, (box_of_rows(sharded),), spec), _Have.SAME_ROWS
    return Kept(value, tuple(value.shape), (Box.whole(value.shape),), None), _Have.ALL


def _name_of(parameter: nn.Parameter, names: Mapping[int, str]) -> str:
    if id(parameter) not in names:
        raise CheckpointError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the wrapped "
            "model's, and has no name to be saved by. Register it in the module that is wrapped, before "
            "DistributedModel, or leave its optimizer unwrapped."
        )
    return names[id(parameter)]


class _Have(Enum):
    """The replicas that have the same elements as this one."""

    ALL = "all of them: nothing is shared"
    SAME_ROWS = "those of other shard groups: ranks of a shard group have different rows"
    SAME_RANGE = "those of its shard group, in each of the groups that share updates"
    SAME_RANGE_OF_ROWS = "one of each group that shares updates: of a shard group all have different rows"


class _Turns:
    """Chooses the rank that saves what several have: the one that has the least to do so far."""

    def __init__(self) -> None:
        run = script_run()
        mesh, data_rank = run.mesh, run.data_rank
        group, place = divmod(data_rank, mesh.shard)
        of_updates = run.config.num_updating(mesh)
        updating, num_updating = group // of_updates, mesh.data // mesh.shard // of_updates
        self._copy_of = run.copy_of
        self._replicas = {
            _Have.ALL: (data_rank, mesh.data),
            _Have.SAME_ROWS: (group, mesh.data // mesh.shard),
            _Have.SAME_RANGE: (updating * mesh.shard + place, num_updating * mesh.shard),
            _Have.SAME_RANGE_OF_ROWS: (updating, num_updating),
        }
        self._loads: dict[tuple[_Have, int], list[int]] = {}

    def is_mine(self, numel: int, have: _Have, spec: Spec | None) -> bool:
        """Takes a turn; all ranks that have the same elements take the same ones."""
        mine, count = self._replicas[have]
        num_parts = 1 if spec is None else spec.group.num_ranks
        place, num_places = self._copy_of(num_parts)
        mine, count = mine * num_places + place, count * num_places
        loads = self._loads.setdefault((have, num_parts), [0] * count)
        chosen = loads.index(min(loads))
        loads[chosen] += numel + 1  # so that empty ones take turns, too
        return chosen == mine


def _tensors(
    model: DistributedModel, optimizer: DistributedOptimizer, parameter: nn.Parameter
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that an optimizer keeps of a parameter: rows or a range of it, or all."""
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
    """
    if sharded is None:
        return False
    is_local = optimizer.sees_rows or key == MASTER
    return isinstance(value, ShardedTensor) or (is_local and value.shape == sharded.rows.shape)


def sharded_of(model: DistributedModel, tensor: Tensor) -> ShardedParameter | None:
    """The rows of a parameter that this rank keeps; None where it keeps all of it."""
    sharding = model.replicas.sharding
    return None if sharding is None else sharding.parameters.get(id(tensor))


def shared_spec(model: DistributedModel, tensor: Tensor) -> Spec | None:
    """How ranks share a parameter, of which this one has a part; None where it is whole."""
    sharded = sharded_of(model, tensor)
    if sharded is not None:
        return sharded.spec
    return tensor._spec if isinstance(tensor, DividedTensor) else None


def box_of_rows(sharded: ShardedParameter) -> Box:
    """The rows that this rank keeps of a parameter that replicas share."""
    rows, part = sharded.own_rows, sharded.part_shape
    return Box((rows.start, *(0 for _ in part[1:])), (len(rows), *part[1:]))


def boxes_of_update(model: DistributedModel, parameter: nn.Parameter) -> tuple[Box, ...] | None:
    """The range that this rank updates of a parameter; None where it updates all that it has of it."""
    sharded, updated = sharded_of(model, parameter), model.replicas.updated_parts
    own = None if updated is None else updated.own_range(parameter if sharded is None else sharded.rows)
    if own is None:
        return None
    part = tuple(local_of(parameter).shape) if sharded is None else sharded.part_shape
    begin = 0 if sharded is None else sharded.own_rows.start * prod(part[1:])
    return tuple(boxes_of_range(part, begin + own.start, begin + own.stop))
