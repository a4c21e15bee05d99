"""One operation with its arguments, as a rule sees it: shapes and placements, no data."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.placement import WHOLE, Cut, PartialSum, Placement
from shardwright.torch._private import memory_of
from shardwright.torch.tensor_parallel.divided_tensor import (
    DividedTensor,
    is_nested,
    part_in,
    placement_in,
    placement_of,
)
from shardwright.torch.tensor_parallel.group import TensorGroup

__all__ = ["Call", "Input", "map_tensors", "name_of", "tensors_of"]


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor argument.

    Attributes:
        index: its place among the tensors of the call.
        is_known: all elements are at hand: its sum was taken already, or it was gathered just now.
        lasts: it is a part of a parameter, or a view of one.
        inside: where the elements of a rank's part are among the ranks of an inner group.
    """

    index: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    placement: Placement
    is_known: bool = False
    lasts: bool = False
    inside: Placement = WHOLE

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)

    @property
    def cut(self) -> Cut | None:
        """The placement, if it is a cut."""
        return self.placement if isinstance(self.placement, Cut) else None

    @property
    def pending(self) -> bool:
        """Whether the sum over the ranks is still to be taken."""
        return isinstance(self.placement, PartialSum)


# What these write is missing in their schemas.
_UNDECLARED_WRITES = dict.fromkeys(
    ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"), ("running_mean", "running_var")
)


class Call:
    """An operation of PyTorch with its arguments.

    Attributes:
        name: the operator's name, without namespace and overload.
        group: the ranks that share its tensors.
        inputs: its tensor arguments in order, those in lists included.
        outputs: its results, as tensors without data, in order; None where a result is no tensor. Empty if
            they cannot be known beforehand.
        written: indices of the inputs that it changes in place.
        arguments: every argument of the schema by its name, with an `Input` for each tensor.
        flops: of the whole operation; None if it is as fast as memory. A rule sets it.
    """

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], group: TensorGroup):
        self.func = func
        self.name = name_of(func)
        self.group = group
        self.inputs: list[Input] = []
        self.outputs: list[Tensor | None] = []
        self.written: set[int] = set()
        self.arguments: dict[str, Any] = {}
        self.flops: float | None = None
        for place, argument in enumerate(func._schema.arguments):
            if place < len(args):
                value = args[place]
            elif argument.name in kwargs:
                value = kwargs[argument.name]
            else:
                value = argument.default_value if argument.has_default_value() else None
            first = len(self.inputs)
            self.arguments[argument.name] = map_tensors(self._input, value)
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.written |= set(range(first, len(self.inputs)))

        if self.get("training"):
            undeclared = (self.arguments[name] for name in _UNDECLARED_WRITES.get(self.name, ()))
            self.written |= {one.index for one in undeclared if isinstance(one, Input)}

    def _input(self, tensor: Tensor) -> Input:
        placement = placement_in(tensor, self.group)
        one = Input(
            len(self.inputs),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            placement,
            self._is_known(tensor),
            self._lasts(tensor),
            WHOLE if self.group.inner is None else placement_of(part_in(tensor, self.group)),
        )
        self.inputs.append(one)
        return one

    def _lasts(self, tensor: Tensor) -> bool:
        lasting = self.group.lasting
        return bool(lasting) and memory_of(part_in(tensor, self.group)) in lasting

    def _is_known(self, tensor: Tensor) -> bool:
        if not isinstance(tensor, DividedTensor) or tensor._spec.group is not self.group or is_nested(tensor):
            return False
        if tensor._spec.is_pending:
            return self.group.sums.knows(tensor._local)
        gathers = self.group.gathers
        return gathers is not None and tensor._spec.is_cut and gathers.knows(tensor._local, tensor._spec)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        """An argument, or a default where the schema has none of this name."""
        return self.arguments.get(name, default)

    def dim(self, name: str = "dim", ndim: int | None = None) -> int:
        """An argument that is a dimension of the first tensor, from 0."""
        size = self.inputs[0].ndim if ndim is None else ndim
        value: int = self.arguments[name]
        return value + size if value < 0 else value

    @property
    def num_ranks(self) -> int:
        """Of the group."""
        return self.group.num_ranks

    @property
    def is_view(self) -> bool:
        """Whether the result shares the memory of an argument that stays as it is."""
        return any(
            each.alias_info is not None and not each.alias_info.is_write for each in self.func._schema.returns
        )


def name_of(func: Any) -> str:
    """The name of an operator, without namespace and overload."""
    return str(func._schema.name).partition("::")[2]


def map_tensors(function: Any, value: Any) -> Any:
    """An argument with something else in the place of each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return [map_tensors(function, each) for each in value]
    return value


def tensors_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensor arguments of a call, in order, those in lists included."""
    for value in (*args, *kwargs.values()):
        yield from _tensors_in(value)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)
