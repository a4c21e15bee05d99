"""The ways in which operations of a recorded step run, and what a search has found."""

import contextlib
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from shardwright.placement import WHOLE, BetweenUnits, Cut, Placement, Whole
from shardwright.torch._private.tensors import FAKE_FAILURES
from shardwright.torch.tensor_parallel.call import Call, Candidate, Input
from shardwright.torch.tensor_parallel.deciding import choose
from shardwright.torch.tensor_parallel.decision import Decision, returned_arguments
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.search.recording import Operation, Recording
from shardwright.torch.tensor_parallel.search.unit import Material
from shardwright.torch.tensor_parallel.spec import local_shape

Goal = Literal["speed", "memory"]

# Holding all parameters is worth so many steps of the time that a step takes with all of them whole. So for
# speed, a plan that halves what a rank holds may take a quarter longer. A price by bytes would leave small
# models whole, whose users asked for a division all the same, and outweigh everything on fast memory.
MEMORY_WEIGHT: dict[Goal, float] = {"speed": 0.5, "memory": 4.0}

# Of Python and of the dispatch, without which a step of a small model would seem to take no time.
OPERATION_S = 20e-6

# Of an operation's seconds, those that do not depend on its size.
KERNEL_S = 4e-6


@dataclass(frozen=True, slots=True)
class PlanPrice:
    """Seconds of a step, of the busiest rank.

    Attributes:
        exchange_s: of changes of placement, those within operations and of gradients included.
        memory_s: what the parameters that a rank holds count, against seconds.
    """

    work_s: float = 0.0
    exchange_s: float = 0.0
    memory_s: float = 0.0

    @property
    def total_s(self) -> float:
        """By which plans are compared."""
        return self.work_s + self.exchange_s + self.memory_s

    def __add__(self, other: "PlanPrice") -> "PlanPrice":
        return PlanPrice(
            self.work_s + other.work_s, self.exchange_s + other.exchange_s, self.memory_s + other.memory_s
        )


@dataclass(frozen=True, slots=True)
class WorkShares:
    """Shares of a unit's forward and of its backward that the busiest rank computes."""

    forward: float = 1.0
    backward: float = 1.0


@dataclass(frozen=True, slots=True)
class FoundPlacements:
    """The cheapest plan.

    Attributes:
        whole_price: the same with all parameters whole but those that are pinned.
        divided: share of the parameters' elements that are cut.
        kind_of: the first unit of the kind of each unit, by name.
        shares: of a kind's work, by the name of its first unit.
        kept_whole: modules of which no step can be recorded, so that all ranks have their parameters, by
            name, and the reasons.
    """

    placements: Mapping[str, Placement]
    price: PlanPrice
    whole_price: PlanPrice
    divided: float
    kind_of: Mapping[str, str]
    shares: Mapping[str, WorkShares]
    kept_whole: Mapping[str, str]

    def of_unit(self, name: str) -> dict[str, Placement]:
        """Placements of the parameters of one unit, by their names within it."""
        prefix = f"{name}." if name else ""
        return {key[len(prefix) :]: each for key, each in self.placements.items() if key.startswith(prefix)}


# Operations that look at cuts which earlier ones made known.
_HEED_CUTS = frozenset(["embedding_dense_backward", "slice_backward"])


@dataclass(slots=True)
class Way:
    """How an operation runs with certain placements.

    Attributes:
        sums: inputs whose pending sum is taken for all that see it, and the seconds of it.
        scatters: inputs whose pending sum goes to where they are cut, the seconds of it, and the cut.
        gathers: inputs that are gathered, and kept for others that come soon, and the seconds of it.
        outputs: numbers and placements of the results.
        wants: whole inputs of which it takes a part, and the cut.
        copies: the result is a view for the script, with memory of its own.
        cuts: that it made known for later gradients (see `TensorGroup.cuts`).
    """

    work_s: float
    exchange_s: float
    sums: list[tuple[int, float]]
    scatters: list[tuple[int, float, Placement]]
    gathers: list[tuple[int, float]]
    outputs: list[tuple[int, Placement]]
    wants: list[tuple[int, Cut]]
    written: list[int]
    copies: bool
    cuts: dict[tuple[Any, ...], Cut]


class _RecordedCall(Call):
    """A recorded operation with other placements than it had."""

    def __init__(
        self,
        operation: Operation,
        placements: tuple[Placement, ...],
        known: Any,
        lasting: Sequence[bool],
        group: TensorGroup,
    ):
        self._placements = iter(zip(placements, known, lasting, strict=True))
        super().__init__(operation.func, operation.args, operation.kwargs, group)
        self.outputs = list(operation.outputs)

    def _input(self, tensor: Tensor) -> Input:
        shape, strides, dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype
        one = Input(len(self.inputs), shape, strides, dtype, *next(self._placements))
        self.inputs.append(one)
        return one


class Ways:
    """The ways in which the operations of one recording run."""

    def __init__(self, recording: Recording, group: TensorGroup, between: BetweenUnits):
        self._recording = recording
        self._group = group
        self._between = between
        self._lasting = {recording.memories[number] for number in recording.parameters.values()}
        self._without_data = Material()
        self._known: dict[tuple[Any, ...], Way] = {}
        # Equal placements are one object, so that its identity may stand in the key of a way.
        self._placements: dict[Placement, Placement] = {WHOLE: WHOLE}

    def one(self, placement: Placement) -> Placement:
        """The object that stands for all placements equal to this one."""
        return self._placements.setdefault(placement, placement)

    def whole_work_s(self, operation: Operation) -> float:
        if operation.func is None:
            return 0.0
        count = len(operation.inputs)
        nothing = (False,) * count
        call = _RecordedCall(operation, (WHOLE,) * count, nothing, nothing, self._group)
        return _work_s(call, choose(call)[0])

    def of(
        self, operation: Operation, placements: tuple[Placement, ...], at_hand: tuple[bool, ...] | None
    ) -> Way:
        key: tuple[Any, ...] = (operation.index, *map(id, placements))
        if at_hand is not None:
            key = (*key, at_hand)
        if operation.name in _HEED_CUTS:
            key = (*key, tuple(self._group.cuts.items()))
        way = self._known.get(key)
        if way is None:
            nowhere = (False,) * len(placements)
            way = self._known[key] = self._decided(operation, placements, at_hand or nowhere)
        return way

    def _decided(
        self, operation: Operation, placements: tuple[Placement, ...], known: tuple[bool, ...]
    ) -> Way:
        group = self._group
        earlier, noted = group.cuts, dict[tuple[Any, ...], Cut]()
        group.cuts = ChainMap(noted, earlier)
        lasting = [self._recording.memories[each] in self._lasting for each in operation.inputs]
        call = _RecordedCall(operation, placements, known, lasting, group)
        candidate, has_rule = choose(call)
        group.cuts = earlier
        decision = Decision(call, candidate, operation.args, has_rule=has_rule)
        way = Way(
            work_s=_work_s(call, candidate),
            exchange_s=0.0,
            sums=[],
            scatters=[],
            gathers=[],
            outputs=[],
            wants=[],
            written=[operation.inputs[index] for index in sorted(call.written)],
            copies=call.is_view
            and bool(placements)
            and (candidate.copies or candidate.inputs[0] != placements[0]),
            cuts=noted,
        )
        for one, target in zip(call.inputs, candidate.inputs, strict=True):
            number = operation.inputs[one.index]
            if one.placement == target:
                continue
            time_s = group.time_s(one.shape, one.dtype.itemsize, one.placement, target)
            if isinstance(one.placement, Whole) and isinstance(target, Cut):
                way.wants.append((number, target))
            elif one.pending and isinstance(target, Cut) and self._between.cuts and not call.written:
                way.scatters.append((number, time_s, target))
            elif isinstance(target, Whole) and not call.written and not call.is_view:
                if one.pending:
                    way.sums.append((number, time_s))
                elif self._between.cuts:
                    way.gathers.append((number, time_s))
                else:
                    way.exchange_s += time_s
            else:
                way.exchange_s += time_s
        if candidate.compute is not None and not call.is_view:
            way.exchange_s += self._inside_s(call, candidate, decision, operation)
        returned = returned_arguments(operation.func)
        for index, result in enumerate(operation.output_numbers):
            is_argument = index < len(returned) and returned[index] is not None
            if result is not None and not is_argument and index < len(candidate.outputs):
                way.outputs.append((result, self.one(candidate.outputs[index])))
        return way

    def _inside_s(self, call: Call, candidate: Candidate, decision: Decision, operation: Operation) -> float:
        """Seconds of the collectives within an operation: it runs once on parts without data."""
        traffic, prices = self._group.traffic, self._group.prices
        calls, sent = traffic.calls.total(), traffic.sent_bytes.total()
        with self._without_data.in_use():
            parts = [
                torch.empty(local_shape(one.shape, target, self._group.rank), dtype=one.dtype)
                for one, target in zip(call.inputs, candidate.inputs, strict=True)
            ]
            # Some choose among their own elements by values, after their collectives.
            with contextlib.suppress(*FAKE_FAILURES):
                decision.computed(operation.args, operation.kwargs, parts)
        calls, sent = traffic.calls.total() - calls, traffic.sent_bytes.total() - sent
        return calls * prices.latency_s + sent / prices.bandwidth_Bps


def _work_s(call: Call, candidate: Candidate) -> float:
    """Seconds of the operation itself, on the rank with the largest part."""
    prices = call.group.prices
    if call.flops is not None:
        time_s = call.flops / prices.flops_per_s
    elif call.is_view:
        return 0.0
    else:
        moved = sum(each.numel() * each.element_size() for each in call.outputs if each is not None)
        time_s = moved / prices.memory_Bps
    if candidate.share == 1:
        return time_s
    cuts = (each for each in (*candidate.inputs, *candidate.outputs) if isinstance(each, Cut) and each.size)
    cut = next(cuts, None)
    if cut is None:
        return time_s * candidate.share
    return time_s * max(cut.length(rank) for rank in range(call.num_ranks)) / cut.size
