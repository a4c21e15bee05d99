"""Splits the arguments of a step function into microbatches."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from shardwright.errors import UsageError
from shardwright.planner.profiles import too_few_samples
from shardwright.runtime.step_function import StepParameters
from shardwright.torch.pytorch.tree import LEAF, Structure, flatten

log = logging.getLogger(__name__)


def is_batch_tensor(item: Any) -> bool:
    """Whether a leaf of the arguments is data: a tensor, and not a parameter."""
    return type(item) is Tensor or (isinstance(item, Tensor) and not isinstance(item, nn.Parameter))


class Argument(NamedTuple):
    """One argument of the step function; objects that cut themselves are leaves of it."""

    name: str
    tree: Any
    leaves: list[Any]
    structure: Structure


CutTensor: TypeAlias = tuple[str, Tensor, int]


@dataclass(frozen=True, slots=True)
class Splitter(StepParameters):
    """Cuts the arguments of a step function into microbatches.

    Every tensor is cut along axis 0, also inside lists, tuples, dicts and dataclasses. A list with an item
    for each sample is cut where it is named. Objects with ``smp_slice(num_microbatches, microbatch, axis)``
    cut themselves; anything else goes to every microbatch whole.

    Attributes:
        axes: name -> axis along which it is cut.
        lists: names of lists with an item for each sample.
        in_one: the batch is one microbatch, whatever the plan says.
        pointed_out: names of others that may be such lists, once a line has said so.
    """

    non_split: frozenset[str] = frozenset()
    axes: Mapping[str, int] = field(default_factory=dict)
    lists: frozenset[str] = frozenset()
    in_one: bool = False
    pointed_out: set[str] = field(default_factory=set, compare=False, repr=False)

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Argument]:
        trees = [(self.name_of(position), tree) for position, tree in enumerate(args)] + [*kwargs.items()]
        return [Argument(name, tree, *flatten(tree, cuts_itself)) for name, tree in trees]

    def keeps_whole(self, arguments: Sequence[Argument]) -> bool:
        """Whether the script has named tensors that every microbatch gets whole."""
        return any(
            argument.name in self.non_split and any(map(is_batch_tensor, argument.leaves))
            for argument in arguments
        )

    def split(
        self, arguments: Sequence[Argument], cut: Sequence[CutTensor], num_microbatches: int
    ) -> list[list[Argument]]:
        """The arguments of each microbatch, in the same order, by the tensors of them that are cut."""
        self._check(arguments, cut, num_microbatches)
        parts = [self._split_one(argument, num_microbatches) for argument in arguments]
        return [list(each) for each in zip(*parts, strict=True)] if parts else [[]] * num_microbatches

    def changed(
        self,
        arguments: Sequence[Argument],
        change: Callable[[Sequence[tuple[Tensor, int]]], Sequence[Tensor]],
    ) -> list[Any]:
        """The arguments with other tensors in the place of those that are cut."""
        cut: list[tuple[Tensor, int]] = []
        for name, _, leaves, _ in arguments:
            if name in self.lists or (name not in self.non_split and any(map(cuts_itself, leaves))):
                raise UsageError(
                    f"{name} is cut into microbatches as a list or by its own smp_slice, and cannot be put "
                    "together with those of other ranks. Give all of them the same batch: prescaled_batch."
                )
            cut += [(leaf, self._axis(name)) for leaf in leaves if self.cuts(name, leaf)]
        made = iter(change(cut))
        return [
            argument.structure.rebuild(
                [next(made) if self.cuts(argument.name, leaf) else leaf for leaf in argument.leaves]
            )
            for argument in arguments
        ]

    def cuts(self, name: str, leaf: Any) -> bool:
        return name not in self.non_split and is_batch_tensor(leaf) and leaf.dim() > self._axis(name)

    def cuts_alike(self, arguments: Sequence[Argument]) -> bool:
        """Whether microbatches of equal sizes have tensors of equal shapes, and the same other things."""
        return not self.lists and not any(cuts_itself(leaf) for each in arguments for leaf in each.leaves)

    def _axis(self, name: str) -> int:
        return self.axes.get(name, 0)

    def cut_tensors(self, arguments: Sequence[Argument]) -> list[CutTensor]:
        """The tensors that are cut: the name of the argument, the tensor, its size along the axis."""
        cut = []
        for name, _, leaves, _ in arguments:
            if name in self.lists or name in self.non_split:
                continue
            axis = self._axis(name)
            cut += [
                (name, leaf, leaf.shape[axis])
                for leaf in leaves
                if is_batch_tensor(leaf) and leaf.dim() > axis
            ]
        return cut

    def _check(self, arguments: Sequence[Argument], cut: Sequence[CutTensor], num_microbatches: int) -> None:
        if not cut:
            return
        first_name, _, batch = cut[0]
        self._look_at_lists(arguments, first_name, batch)
        for name, tensor, size in cut:
            if size != batch and num_microbatches > 1:  # one is the whole batch, say of a graph
                for argument in arguments:
                    refuse_packed(argument.structure)
                raise UsageError(
                    f"{name} has {size} rows along axis {self._axis(name)} (shape "
                    f"{tuple(tensor.shape)}), but {first_name} has {batch}, so the batch cannot be cut "
                    f"into microbatches. {_remedy(name, size, batch)}"
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

    def _look_at_lists(self, arguments: Sequence[Argument], first_name: str, batch: int) -> None:
        """Refuses lists that cannot be cut, and points out those that may have to be."""
        for name, tree, *_ in arguments:
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

    def _split_one(self, argument: Argument, num_microbatches: int) -> list[Argument]:
        name, tree, leaves, structure = argument
        if name in self.non_split:
            return [argument] * num_microbatches
        if name in self.lists:
            numbers = torch.arange(len(tree)).tensor_split(num_microbatches)
            trees = [[tree[number] for number in part.tolist()] for part in numbers]
            return [Argument(name, each, *flatten(each, cuts_itself)) for each in trees]
        axis = self._axis(name)
        columns: list[Sequence[Any]] = []
        for item in leaves:
            if is_batch_tensor(item) and item.dim() > axis:
                columns.append(torch.tensor_split(item, num_microbatches, dim=axis))
            elif cuts_itself(item):
                columns.append(
                    [item.smp_slice(num_microbatches, index, axis) for index in range(num_microbatches)]
                )
            else:
                columns.append([item] * num_microbatches)
        if structure is LEAF and len(columns) == 1 and type(leaves[0]) is Tensor:
            return [Argument(name, part, [part], LEAF) for part in columns[0]]
        rows = [list(row) for row in zip(*columns, strict=True)] if columns else [[]] * num_microbatches
        parts = [Argument(name, structure.rebuild(row), row, structure) for row in rows]
        if not any(map(cuts_itself, leaves)):
            return parts
        return [Argument(name, part.tree, *flatten(part.tree, cuts_itself)) for part in parts]


def _remedy(name: str, size: int, batch: int) -> str:
    rows = size // batch if batch else 0
    each = ""
    if rows > 1 and rows * batch == size:
        each = (
            f"If it has {rows} for each sample, pass {name}.unflatten(0, (-1, {rows})), and flatten it in "
            "the step function. "
        )
    return (
        f'{each}Name what must not be cut: @sw.step(non_split_inputs=["{name}"]), or another axis: '
        f'input_split_axes={{"{name}": 1}}, or a list with an item for each sample: split_lists=["{name}"]. '
        "A batch that cannot be cut at all, such as a graph, goes through the model as one: microbatches 1."
    )


def refuse_packed(structure: Structure) -> None:
    """Refuses a batch with a packed sequence, which is cut by time steps."""
    if isinstance(structure.template, PackedSequence):
        raise UsageError(
            "the batch has a PackedSequence, whose rows belong to no sample: it is neither cut nor sent to "
            "other ranks. Pass the padded tensor and the lengths to the step function, and pack "
            "them inside the module with the recurrent layer."
        )
    for child in structure.children:
        refuse_packed(child)


def cuts_itself(item: Any) -> bool:
    """Whether an object knows how it is cut, also where it is a container of tensors."""
    return type(item) is not Tensor and not isinstance(item, nn.Module) and hasattr(item, "smp_slice")


def _may_be_of_samples(tree: Any, batch: int) -> bool:
    """Whether a list that is not cut has as many items as the batch has samples: texts, or targets."""
    return type(tree) is list and len(tree) == batch > 1 and not all(isinstance(x, Tensor) for x in tree)
