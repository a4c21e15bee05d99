"""One operation with its arguments, how its result's dimensions follow, and the rule that knows.

A form names each dimension of each tensor by a letter, as `torch.einsum` does. Of ``mk,kn->mn``:

- m or n may be cut: the tensors that have the letter are cut alike, the others are whole.
- k may be cut, too. The result is a sum over k, so each rank gets a summand of it.
- The product is linear in either factor: a partial sum times a whole matrix is a partial sum.

All rules of this package are forms, or candidates by hand where an operation needs more (a softmax over a
cut dimension takes a maximum and a sum over the ranks in between).

A rule takes a `Call` and returns a `Form`, or `Candidate` objects, or None where it knows no way to divide
this call. Then, and without a rule, every rank gathers the inputs and does it all.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwright.placement import PARTIAL_SUM, WHOLE, Cut, PartialSum, Placement
from shardwright.torch._private.tensors import memory_of
from shardwright.torch.pytorch.functions import tensors_in
from shardwright.torch.tensor_parallel.divided_tensor import (
    DividedTensor,
    is_nested,
    part_in,
    placement_in,
    placement_of,
)
from shardwright.torch.tensor_parallel.group import TensorGroup


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
        return len(self.shape)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def cut(self) -> Cut | None:
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
        inputs: its tensor arguments in order, those in lists included.
        outputs: its results, as tensors without data, in order; None where a result is no tensor. Empty if
            they cannot be known beforehand.
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


def tensors_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensor arguments of a call, in order, those in lists included."""
    return tensors_in([*args, *kwargs.values()])


Letter = Hashable
Letters = tuple[Letter | None, ...]
"""One for each dimension; None for a dimension of size 1 that is stretched."""

Compute = Callable[..., Any]
"""Called as ``compute(group, func, args, kwargs)`` with parts; may use the group's collectives."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run an operation on parts.

    Attributes:
        arguments: scalars that differ for a rank's part, by name: ``arguments(rank)``.
        share: of the operation's work that one rank does.
        exchange_s: seconds of what `compute` exchanges, at least.
        copies: the result of a view has memory of its own (`placing.py`).
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    arguments: Callable[[int], Mapping[str, Any]] | None = None
    compute: Compute | None = None
    share: float = 1.0
    preferred: bool = False
    exchange_s: float = 0.0
    copies: bool = False


@dataclass(frozen=True, slots=True)
class Form:
    """The letters of an operation.

    Attributes:
        uncut: letters that every rank needs whole (the dimension of a softmax).
        sums: for each result the letters that it is a sum over. A cut letter that is in neither a result nor
            its sums leaves that result whole.
        terms: arguments that the results are linear in. Every term is a set of indices, linear in each of
            them; the results are the sum of all terms.
        sizes: scalar arguments that are shapes, and their letters.
        fills_all: the kernel needs at least one slice on each rank.
        flops: of the whole operation; None for those that are as fast as memory.
    """

    inputs: tuple[Letters, ...]
    outputs: tuple[Letters, ...]
    uncut: frozenset[Letter] = frozenset()
    sums: tuple[frozenset[Letter], ...] = ()
    terms: tuple[tuple[int, ...], ...] = ()
    sizes: Mapping[str, Letters] = field(default_factory=dict)
    fills_all: bool = False
    flops: float | None = None


def letters(text: str) -> tuple[tuple[Letters, ...], tuple[Letters, ...]]:
    """Inputs and outputs of ``"mk,kn->mn"``."""
    left, right = text.split("->")
    return tuple(tuple(each) for each in left.split(",")), tuple(tuple(each) for each in right.split(","))


def broadcast(shape: Sequence[int], onto: Sequence[int], names: Letters | None = None) -> Letters:
    """The letters of a tensor that is stretched to a shape, from the last dimension on."""
    names = tuple(range(len(onto))) if names is None else names
    offset = len(onto) - len(shape)
    return tuple(
        names[offset + dim] if size == onto[offset + dim] else None for dim, size in enumerate(shape)
    )


def candidates_of(call: Call, form: Form) -> list[Candidate]:
    """All ways to run an operation of a form that its inputs suggest."""
    found = list(_pending(call, form))
    cuts: dict[tuple[Letter, Any], None] = {}
    for one in call.inputs:
        if one.cut is not None and (letter := form.inputs[one.index][one.cut.dim]) is not None:
            cuts[letter, one.cut.runs] = None
        elif one.pending and call.group.between is not None:
            # Its sum may go to where such tensors are cut.
            to = call.group.between.placement(one.shape)
            if isinstance(to, Cut) and (letter := form.inputs[one.index][to.dim]) is not None:
                cuts[letter, to.runs] = None
    for letter, runs in cuts:
        candidate = _cut(call, form, letter, Cut(0, runs))
        if candidate is not None:
            found.append(candidate)
    return found


def _pending(call: Call, form: Form) -> list[Candidate]:
    """Leaves a sum over the ranks pending."""
    if not form.terms or not any(call.inputs[index].pending for term in form.terms for index in term):
        return []
    placements: list[Placement] = [WHOLE] * len(call.inputs)
    for term in form.terms:
        # A whole term counts once: on one rank.
        chosen = next((index for index in term if call.inputs[index].pending), term[0])
        placements[chosen] = PARTIAL_SUM
    # A sum with other tensors may have more summands to come. Otherwise the sum over the ranks is as cheap
    # now as later, and all later uses share it.
    alone = {term[0] for term in form.terms if len(term) == 1}
    preferred = all(one.pending or not one.shape or one.index in alone for one in call.inputs)
    return [Candidate(tuple(placements), (PARTIAL_SUM,) * len(form.outputs), preferred=preferred)]


def _cut(call: Call, form: Form, letter: Letter, cut: Cut) -> Candidate | None:
    """Cuts the dimensions of one letter."""
    if letter in form.uncut or (form.fills_all and not cut.reaches(call.num_ranks)):
        return None
    inputs: list[Placement] = []
    for own in form.inputs:
        if own.count(letter) > 1:
            return None
        inputs.append(cut.at(own.index(letter)) if letter in own else WHOLE)
    outputs: list[Placement] = []
    for index, own in enumerate(form.outputs):
        if own.count(letter) > 1:
            return None
        if letter in own:
            outputs.append(cut.at(own.index(letter)))
        elif form.sums and letter in form.sums[index]:
            outputs.append(PARTIAL_SUM)
        else:
            outputs.append(WHOLE)
    if PARTIAL_SUM in outputs:
        for term in form.terms:
            # A term that does not run over the letter would be added by every rank.
            if not any(letter in form.inputs[index] for index in term):
                inputs[term[0]] = PARTIAL_SUM
    own_sizes = {name: own.index(letter) for name, own in form.sizes.items() if letter in own}

    def arguments(rank: int) -> Mapping[str, Any]:
        changed = {}
        for name, dim in own_sizes.items():
            changed[name] = [*call[name]]
            changed[name][dim] = cut.length(rank)
        return changed

    return Candidate(
        tuple(inputs),
        tuple(outputs),
        arguments=arguments if own_sizes else None,
        share=1 / call.num_ranks,
    )


Rule = Callable[[Call], Form | list[Candidate] | None]
_R = TypeVar("_R", bound=Rule)

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[_R], _R]:
    """Makes a function the rule of these operators of `aten`, and of their in-place variants."""

    def register(function: _R) -> _R:
        for name in names:
            RULES[name] = function
        return function

    return register
