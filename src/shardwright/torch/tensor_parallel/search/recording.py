"""One step of a unit as a list of operations, forward and backward; ranks that are not there.

Tensors have no data, unless the way of the step depends on values (a loop over the experts that some token
takes). Then the step runs on random numbers; where the unit is too large for that, the innermost module that
looks at values is kept whole, and a stand-in gives its results::

    without data ──looks at values──► on random numbers ──too large──► without data, a module kept whole
         └──────── fails otherwise ───────────┴─────────────────────────────────────► the unit kept whole

Code that fails otherwise may leave PyTorch's dispatcher, where divided tensors cannot follow: all of its unit
is kept whole.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.placement import BetweenUnits
from shardwright.torch._private.tensors import FAKE_FAILURES, memory_of
from shardwright.torch.pytorch.tree import leaves, map_tree
from shardwright.torch.tensor_parallel.call import name_of, tensors_of
from shardwright.torch.tensor_parallel.deciding import decide
from shardwright.torch.tensor_parallel.group import Prices, TensorGroup
from shardwright.torch.tensor_parallel.search.unit import (
    Boundary,
    Material,
    Results,
    StandIn,
    Unit,
    copy_of,
    is_small,
    results_of,
    tensors_in,
)


class _NoRanks:
    """Collectives of which only shapes count; the numbers are some that can be computed with."""

    def __init__(self, rank: int, num_ranks: int):
        self.rank, self.num_ranks = rank, num_ranks

    def all_reduce(self, data: Tensor, operation: Literal["sum", "max", "min"]) -> None:
        pass

    def all_gather(self, output: Tensor, data: Tensor) -> None:
        output.view(self.num_ranks, -1).copy_(data)

    def all_to_all(self, output: Tensor, data: Tensor, receives: Sequence[int], sends: Sequence[int]) -> None:
        output.zero_()


def groups_without_ranks(
    rank: int, num_ranks: int, prices: Prices, between: BetweenUnits | None
) -> TensorGroup:
    """The same for the ranks that share a batch: where they share it in two ways, both groups."""
    if between is None or between.inner_ranks == 1:
        return group_without_ranks(rank, num_ranks, prices)
    place, own = divmod(rank, between.inner_ranks)
    group = group_without_ranks(place, between.num_ranks, replace(prices, sums_wait=True))
    group.holds(group_without_ranks(own, between.inner_ranks, prices))
    experts = group_without_ranks(rank, num_ranks, prices)
    group.share_experts(experts, range(own, num_ranks, between.inner_ranks))
    return group


def group_without_ranks(rank: int, num_ranks: int, prices: Prices) -> TensorGroup:
    """A group of one process that decides, and counts what it would send, as a rank of so many."""
    group = TensorGroup(_NoRanks(rank, num_ranks), decide, prices=prices)
    group.is_alone = True
    return group


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of a step. Tensors have numbers.

    Attributes:
        func: the operator; None where all inputs are placed as between units: they leave the unit, or one
            within it.
        outputs: its results; None where a result is no tensor.
    """

    index: int
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[Tensor | None, ...] = ()
    output_numbers: tuple[int | None, ...] = ()

    @property
    def name(self) -> str:
        return "" if self.func is None else name_of(self.func)


@dataclass(slots=True)
class Recording:
    """A step.

    Attributes:
        memories: of each tensor, the number of its memory.
        parameters: number of each parameter, by name.
        gradients: number of the gradient of each parameter that has one, by name.
        entering: numbers of the tensors with which the forward and the backward begin.
    """

    operations: list[Operation] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    memories: list[int] = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)
    gradients: dict[str, int] = field(default_factory=dict)
    num_forward: int = 0
    entering: list[int] = field(default_factory=list)
    material: Material = field(default_factory=Material)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operation below autograd, where divided tensors see them."""

    def __init__(self, recording: Recording):
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording
        self._numbers: dict[int, int] = {}
        self._memories: dict[int, int] = {}

    def number(self, tensor: Tensor) -> int:
        """The number of a tensor; the recording keeps the tensor, so that no other gets its address."""
        found = self._numbers.get(id(tensor))
        if found is None:
            found = self._numbers[id(tensor)] = len(self._recording.tensors)
            self._recording.tensors.append(tensor)
            self._recording.memories.append(self._memories.setdefault(memory_of(tensor), len(self._memories)))
        return found

    def make_whole(self, tensors: Sequence[Tensor]) -> None:
        numbers = tuple(self.number(each) for each in tensors)
        operations = self._recording.operations
        operations.append(Operation(len(operations), None, (), {}, numbers))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # questions that only tensors without data ask: of which device they are
            return func(*args, **kwargs)
        inputs = tuple(self.number(each) for each in tensors_of(args, kwargs))
        results = func(*args, **kwargs)
        flat = list(results) if isinstance(results, list | tuple) else [results]
        outputs = tuple(each if isinstance(each, Tensor) else None for each in flat)
        numbers = tuple(None if each is None else self.number(each) for each in outputs)
        operations = self._recording.operations
        operations.append(Operation(len(operations), func, args, kwargs, inputs, outputs, numbers))
        return results


def step_of(
    results_of_call: Results,
    call: Callable[..., Any],
    args: Any,
    kwargs: Any,
    boundary: Boundary,
    at_backward: Callable[[], None] | None = None,
    entering: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None = None,
    shared: Container[int] = (),
) -> None:
    """One forward and backward of a unit's module."""
    items = [item for place, item in enumerate(leaves((args, kwargs))) if place not in shared]
    inputs = [each for each in items if isinstance(each, Tensor) and each.requires_grad]
    results = list(results_of_call(call(*args, **kwargs)))
    boundary(results)
    if at_backward is not None:
        at_backward()
    roots = [each for each in results if each.requires_grad]
    if roots:
        ones = [torch.ones(each.shape, dtype=each.dtype, device=each.device) for each in roots]
        torch.autograd.backward(roots, ones if entering is None else list(entering(ones)))
    boundary([each.grad for each in inputs if each.grad is not None])


def own_call(unit: Unit, material: Material) -> tuple[Any, Any]:
    """The arguments of a unit's call as leaves of a material."""
    found: tuple[Any, Any] = map_tree(material.like, (unit.args, dict(unit.kwargs)))
    return found


class _Underway:
    """The modules whose forwards have begun and not ended, by name, with their arguments."""

    def __init__(self, module: nn.Module):
        self.calls: list[tuple[str, Any, Any]] = []
        for name, each in module.named_modules():
            each.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
            each.register_forward_hook(self._leave)

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.calls.append((name, args, kwargs))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.calls.pop()


def record(unit: Unit, material: Material | None = None) -> Recording:
    return _record(unit, material or Material(), [])


def _record(unit: Unit, material: Material, underway: list[_Underway]) -> Recording:
    recording = Recording(material=material)
    recorder = _Recorder(recording)
    module = copy_of(unit, material, recorder.make_whole)
    underway.append(_Underway(module))
    args, kwargs = own_call(unit, material)
    for name, parameter in module.named_parameters():
        recording.parameters[name] = recorder.number(parameter)

    def at_backward() -> None:
        recording.num_forward = len(recording.operations)

    def entering(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        recording.entering += [recorder.number(each) for each in tensors]
        return tensors

    results: Results = tensors_in if unit.following is None else unit.following(material)
    given = tensors_in((args, kwargs))
    entering([each for each in given if each.requires_grad] or given)  # others every rank has
    with material.in_use(), recorder:
        step_of(results, unit.call_of(module), args, kwargs, recorder.make_whole, at_backward, entering)
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            recording.gradients[name] = recorder.number(parameter.grad)
    return recording


def recorded(unit: Unit) -> tuple[Unit, Recording]:
    """Records one step of a unit, without modules that cannot be recorded."""
    while True:
        underway: list[_Underway] = []
        try:
            return unit, _record(unit, Material(), underway)
        except FAKE_FAILURES as error:
            reason, looks_at_values = _text_of(error), True
        except Exception as error:
            reason, looks_at_values = _text_of(error), False
        found = None
        if looks_at_values and is_small(unit.module):
            try:
                return unit, _record(unit, Material(is_random=True), [])
            except Exception as error:
                reason = _text_of(error)
        elif looks_at_values:
            found = _innermost(unit, underway, reason)
        if found is None:
            whole = StandIn(unit.module, None, reason=reason)
            return replace(unit, kept_whole={"": whole}), Recording()
        unit = replace(unit, kept_whole={**unit.kept_whole, **found})


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _innermost(unit: Unit, underway: list[_Underway], reason: str) -> dict[str, StandIn] | None:
    """A stand-in for the innermost module in whose forward values count, if there can be one."""
    calls = underway[0].calls if underway else []
    for name, args, kwargs in reversed(calls):
        if name and name not in unit.kept_whole:
            module = unit.module.get_submodule(name)
            try:
                return {name: StandIn(module, results_of(module, args, kwargs), reason=reason)}
            except Exception:
                continue
    return None
