"""The batch: from the first rank of a replica to the others, then cut into microbatches."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.comm.identity.purpose import Purpose
from shardwright.comm.joining.process_group import seal_of_session
from shardwright.comm.messages.small_collectives import SmallCollectives
from shardwright.errors import UsageError
from shardwright.planner.search import too_few_samples
from shardwright.torch.batch.batch_header import Leaf, Outline, outline, read_header, written_header
from shardwright.torch.pytorch.layout import from_memory_order, in_memory_order, order_of
from shardwright.torch.pytorch.tree import LEAF, Structure, flatten

__all__ = ["BatchBroadcast", "Splitter", "copy_back", "copy_of", "is_batch_tensor", "loaded_another"]

log = logging.getLogger(__name__)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_PLAIN = (bool, int, float, str, bytes, complex, slice, torch.dtype, torch.device)


class BatchBroadcast:
    """Gives all ranks of a replica the arguments of its first rank.

    Tensors and plain values (numbers, text, None, arrays of NumPy) come from the first rank; anything else
    (the model, an optimizer, a namespace of options) is each rank's own object at the same place.

    Args:
        replica: collectives of the ranks of the replica.
        source: world rank of the first.
        device: where tensors go.
    """

    def __init__(self, replica: SmallCollectives, *, source: int, device: torch.device):
        self._replica = replica
        self._source = source
        self._device = device
        self._header = b""
        self._outline: Outline | None = None
        self._leaves: list[Leaf] = []
        self._structure = LEAF
        self._seal = seal_of_session()

    def __call__(self, arguments: Arguments) -> Arguments:
        """Collective over the replica."""
        items, structure = flatten(arguments)
        if dist.get_rank() == self._source:
            self._send(items, structure)
            return arguments
        tensors = iter(self._receive(structure))
        described, common = self._leaves, self._structure
        taken: list[Any] = []
        for position, leaf in enumerate(described):
            if leaf.kind == "tensor":
                tensor = from_memory_order(next(tensors), leaf.order)
                taken.append(tensor.requires_grad_() if leaf.requires_grad else tensor)
            elif leaf.kind == "value":
                taken.append(leaf.value)
            elif len(items) == len(described) and structure.key == common.key:
                taken.append(items[position])
            else:
                raise UsageError(
                    f"the first rank of the replica passes a {leaf.value} to the step function, which "
                    "cannot be sent, and this rank passes other arguments. Pass the same objects on "
                    "every rank; tensors may differ."
                )
        args, kwargs = common.rebuild(taken)
        return args, kwargs

    # One broadcast while batches look alike; three where the description changes:
    #
    #     [ 0 | tensors ]                           described as before
    #     [ n | ignored ]  [ n bytes ]  [ tensors ] described anew

    def _send(self, items: Sequence[Any], structure: Structure) -> None:
        described = [_describe(item) for item in items]
        now = outline(described, structure)
        is_as_before = now is not None and now == self._outline
        header = self._header if is_as_before else written_header(described, structure, self._seal)
        tensors = [
            in_memory_order(item.detach().to(self._device), leaf.order)
            for item, leaf in zip(items, described, strict=True)
            if leaf.kind == "tensor"
        ]
        if header != self._header:
            self._broadcast([self._number(len(header)), *self._room()])
            self._broadcast([torch.frombuffer(bytearray(header), dtype=torch.uint8).to(self._device)])
            self._header, self._leaves, self._outline = header, described, now
            self._broadcast(tensors)
        else:
            self._broadcast([self._number(0), *tensors])

    def _receive(self, own: Structure) -> list[Tensor]:
        number, tensors = self._number(0), self._room()
        self._broadcast([number, *tensors])
        header_bytes = int(number.item())
        if not header_bytes:
            return tensors
        header = torch.empty(header_bytes, dtype=torch.uint8, device=self._device)
        self._broadcast([header])
        data = header.cpu().numpy().tobytes()
        self._leaves, self._structure = read_header(data, own, self._seal)
        tensors = self._room()
        self._broadcast(tensors)
        return tensors

    def _room(self) -> list[Tensor]:
        """Tensors as described last."""
        return [
            torch.empty(leaf.shape, dtype=leaf.dtype, device=self._device)
            for leaf in self._leaves
            if leaf.kind == "tensor"
        ]

    def _number(self, number: int) -> Tensor:
        return torch.tensor(number, dtype=torch.int64, device=self._device)

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        self._replica.broadcast(tensors, self._source, Purpose.BATCH)


def _describe(item: Any) -> Leaf:
    if is_batch_tensor(item):
        if item.layout is not torch.strided or item.is_nested:
            raise UsageError(
                f"a tensor of shape {tuple(item.shape)} in the batch has the layout {item.layout}, and only "
                "dense ones are sent to the other ranks. Pass the parts that it is made of (indices, values) "
                "to the step function, and build it there."
            )
        order = order_of(item)
        shape = tuple(in_memory_order(item, order).shape)
        return Leaf("tensor", shape, item.dtype, item.requires_grad, order)
    if item is None or type(item) in _PLAIN or isinstance(item, np.generic | np.ndarray):
        return Leaf("value", value=item)
    return Leaf("local", value=type(item).__name__)


def is_batch_tensor(item: Any) -> bool:
    """Whether a leaf of the arguments is data: a tensor, and not a parameter."""
    return isinstance(item, Tensor) and not isinstance(item, nn.Parameter)


def loaded_another(own: Arguments, agreed: Arguments) -> bool:
    """Whether a batch of the same form has another first or last sample; zeros just fill a place."""
    mine, theirs = flatten(own)[0], flatten(agreed)[0]
    if len(mine) != len(theirs):
        return False
    for item, other in zip(mine, theirs, strict=True):
        if not is_batch_tensor(item) or not is_batch_tensor(other):
            continue
        if item is other or not item.dim() or item.shape != other.shape or item.dtype != other.dtype:
            return False
        with torch.no_grad():
            ends, others = item[[0, -1]], other[[0, -1]].to(item.device)
            return bool(ends.any()) and not torch.allclose(ends, others, rtol=0, atol=0, equal_nan=True)
    return False


def copy_of(arguments: Arguments) -> Arguments:
    """The same arguments with tensors of their own.

    Microbatches are views of one batch. Where a step function changes them in place, autograd would take a
    change of one for a change of all.
    """
    items, structure = flatten(arguments)
    args, kwargs = structure.rebuild([item.clone() if is_batch_tensor(item) else item for item in items])
    return args, kwargs


def copy_back(arguments: Arguments, changed: Arguments) -> None:
    """Puts what a step function did to its copies into the caller's batch."""
    with torch.no_grad():
        for item, new in zip(flatten(arguments)[0], flatten(changed)[0], strict=True):
            if is_batch_tensor(item) and item.shape == new.shape:
                item.copy_(new)


@dataclass(frozen=True, slots=True)
class Splitter:
    """Cuts the arguments of a step function into microbatches.

    Every tensor is cut along axis 0, also inside lists, tuples, dicts and dataclasses. A list with an item
    for each sample is cut where it is named. Objects with ``smp_slice(num_microbatches, microbatch, axis)``
    cut themselves; anything else goes to every microbatch whole.

    Attributes:
        names: names of the positional parameters of the step function.
        further: name of the parameter that takes all further positional arguments.
        non_split: names of arguments that every microbatch gets whole.
        axes: name -> axis along which it is cut.
        lists: names of lists with an item for each sample.
        pointed_out: names of others that may be such lists, once a line has said so.
    """

    names: Sequence[str] = ()
    further: str = ""
    non_split: frozenset[str] = frozenset()
    axes: Mapping[str, int] = frozenset()  # type: ignore[assignment]
    lists: frozenset[str] = frozenset()
    pointed_out: set[str] = field(default_factory=set, compare=False, repr=False)

    def batch_size(self, arguments: Arguments) -> int | None:
        """Samples in the batch: the size of the first tensor along its axis; None if no tensor is cut."""
        for _, _, size in self._cut_tensors(arguments):
            return size
        return None

    def split(self, arguments: Arguments, num_microbatches: int) -> list[Arguments]:
        """The arguments of each microbatch; the first ones are larger where the sizes do not divide.

        Raises:
            UsageError: the batch is smaller than the number of microbatches, or tensors differ in size.
        """
        self._check(arguments, num_microbatches)
        args, kwargs = arguments
        split_args = [self._split_one(self._name(i), arg, num_microbatches) for i, arg in enumerate(args)]
        split_kwargs = {name: self._split_one(name, arg, num_microbatches) for name, arg in kwargs.items()}
        return [
            (
                tuple(parts[index] for parts in split_args),
                {name: parts[index] for name, parts in split_kwargs.items()},
            )
            for index in range(num_microbatches)
        ]

    def _name(self, position: int) -> str:
        if position < len(self.names):
            return self.names[position]
        return self.further or f"argument {position}"

    def _axis(self, name: str) -> int:
        return self.axes.get(name, 0) if isinstance(self.axes, Mapping) else 0

    def _named(self, arguments: Arguments) -> Iterator[tuple[str, Any]]:
        args, kwargs = arguments
        yield from ((self._name(position), arg) for position, arg in enumerate(args))
        yield from kwargs.items()

    def _cut_tensors(self, arguments: Arguments) -> list[tuple[str, Tensor, int]]:
        return [
            (name, item, item.shape[self._axis(name)])
            for name, tree in self._named(arguments)
            if name not in self.non_split and name not in self.lists
            for item in flatten(tree, _cuts_itself)[0]
            if isinstance(item, Tensor)
            and not isinstance(item, nn.Parameter)
            and item.dim() > self._axis(name)
        ]

    def _check(self, arguments: Arguments, num_microbatches: int) -> None:
        cut = self._cut_tensors(arguments)
        if not cut:
            return
        first_name, _, batch = cut[0]
        self._look_at_lists(arguments, first_name, batch)
        for name, tensor, size in cut:
            if size != batch:
                raise UsageError(
                    f"{name} has {size} rows along axis {self._axis(name)} (shape "
                    f"{tuple(tensor.shape)}), but {first_name} has {batch}, so the batch cannot be cut "
                    "into microbatches. Name what must not be cut: "
                    f'@sw.step(non_split_inputs=["{name}"]), or another axis: '
                    f'input_split_axes={{"{name}": 1}}, or a list with an item for each sample: '
                    f'split_lists=["{name}"].'
                )
        if batch == 0:
            raise UsageError(
                f"the batch is empty: {first_name} has 0 rows along axis {self._axis(first_name)}."
            )
        if batch < num_microbatches:
            raise UsageError(
                f"{too_few_samples('the batch', batch, num_microbatches)} A DataLoader leaves a small last "
                "batch out with drop_last=True."
            )

    def _look_at_lists(self, arguments: Arguments, first_name: str, batch: int) -> None:
        """Refuses lists that cannot be cut, and points out those that may have to be."""
        for name, tree in self._named(arguments):
            if name in self.lists:
                if not isinstance(tree, list | tuple) or len(tree) != batch:
                    what = f"{len(tree)} items" if isinstance(tree, list | tuple) else type(tree).__name__
                    raise UsageError(
                        f"split_lists names {name}, which must be a list with an item for each of the "
                        f"{batch} samples of {first_name}, and is {what}."
                    )
            elif name not in self.non_split | self.pointed_out and _may_be_of_samples(tree, batch):
                self.pointed_out.add(name)
                log.warning(
                    "%s is a list of %d items, as many as the batch has samples, and every microbatch gets "
                    'all of them. If each belongs to a sample, have it cut: @sw.step(split_lists=["%s"]). If '
                    'not, non_split_inputs=["%s"] says so.',
                    *(name, batch, name, name),
                )

    def _split_one(self, name: str, tree: Any, num_microbatches: int) -> list[Any]:
        if name in self.non_split:
            return [tree] * num_microbatches
        if name in self.lists:
            numbers = torch.arange(len(tree)).tensor_split(num_microbatches)
            return [[tree[number] for number in part.tolist()] for part in numbers]
        axis = self._axis(name)
        items, structure = flatten(tree, _cuts_itself)
        columns: list[Sequence[Any]] = []
        for item in items:
            if isinstance(item, Tensor) and not isinstance(item, nn.Parameter) and item.dim() > axis:
                columns.append(torch.tensor_split(item, num_microbatches, dim=axis))
            elif _cuts_itself(item):
                columns.append(
                    [item.smp_slice(num_microbatches, index, axis) for index in range(num_microbatches)]
                )
            else:
                columns.append([item] * num_microbatches)
        return [structure.rebuild([column[index] for column in columns]) for index in range(num_microbatches)]


def _cuts_itself(item: Any) -> bool:
    """Whether an object knows how it is cut, also where it is a container of tensors."""
    return hasattr(item, "smp_slice")


def _may_be_of_samples(tree: Any, batch: int) -> bool:
    """Whether a list that is not cut has as many items as the batch has samples: texts, or targets."""
    return type(tree) is list and len(tree) == batch > 1 and not all(isinstance(x, Tensor) for x in tree)
