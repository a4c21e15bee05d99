"""Follows placements through a recorded step, by the rules of the run, without running it.

Each operation is decided as the run decides it, and the decision is kept by the placements of its inputs: of
two plans that differ in one matrix, most operations are decided already. So a plan takes milliseconds.
"""

import contextlib
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwright.placement import WHOLE, BetweenUnits, Cut, PartialSum, Placement, Whole
from shardwright.torch._private import FAKE_FAILURES
from shardwright.torch.tensor_parallel.call import Call, Input
from shardwright.torch.tensor_parallel.deciding import choose
from shardwright.torch.tensor_parallel.decision import Decision, returned_arguments
from shardwright.torch.tensor_parallel.form import Candidate
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.recent_gathers import MOST_KEPT, order_of
from shardwright.torch.tensor_parallel.search.material import Material
from shardwright.torch.tensor_parallel.search.recording import Operation, Recording
from shardwright.torch.tensor_parallel.spec import local_shape

__all__ = ["Flow", "Passed"]

# Operations that look at cuts which earlier ones made known.
_HEED_CUTS = frozenset(["embedding_dense_backward", "slice_backward"])


@dataclass(slots=True)
class Passed:
    """What became of a plan in a step.

    Attributes:
        work_s: of the busiest rank, operation by operation.
        forward_work_s: the part of it in the forward.
        exchange_s: to change placements.
        settle_s: to give gradients the placements of their parameters, once a step.
        wants: cuts in which whole parameters were used, or got their gradients, by name.
    """

    work_s: float = 0.0
    forward_work_s: float = 0.0
    exchange_s: float = 0.0
    settle_s: float = 0.0
    wants: dict[str, list[Cut]] = field(default_factory=dict)


@dataclass(slots=True)
class _Way:
    """How an operation runs with certain placements.

    Attributes:
        work_s, exchange_s: as of `Passed`.
        sums: inputs whose pending sum is taken for all that see it, and the seconds of it.
        scatters: inputs whose pending sum goes to where they are cut, the seconds of it, and the cut.
        gathers: inputs that are gathered, and kept for others that come soon, and the seconds of it.
        outputs: numbers and placements of the results.
        wants: whole inputs of which it takes a part, and the cut.
        written: inputs whose memory it changes.
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


class Flow:
    """Follows placements of parameters through one recording."""

    def __init__(self, recording: Recording, group: TensorGroup, between: BetweenUnits | None = None):
        self.recording = recording
        self._group = group
        self._between = between or BetweenUnits(group.num_ranks)
        group.shares(self._between)
        self._lasting = {recording.memories[number] for number in recording.parameters.values()}
        self._without_data = Material()
        self._ways: dict[tuple[Any, ...], _Way] = {}
        # Equal placements are one object, so that its identity may stand in the key of a way.
        self._placements: dict[Placement, Placement] = {WHOLE: WHOLE}
        self._parameter_views = _parameter_views(recording)
        self._covers = [_covers_its_memory(each) for each in recording.tensors]
        # Most operations of most plans see nothing divided.
        self._whole_work_s = [self._whole_work(each) for each in recording.operations]

    def run(
        self,
        plan: Mapping[str, Placement],
        *,
        watch: Callable[[Operation, list[Placement]], None] | None = None,
        all_whole: bool = False,
    ) -> Passed:
        """Follows a plan.

        Args:
            plan: placements of parameters by name; the others are whole.
            watch: called, in the forward only, with each operation that has a cut input, and the placements
                of all tensors by number. The backward is left out then, and what enters the unit is whole.
            all_whole: what enters the unit is whole in any case.
        """
        recording, group = self.recording, self._group
        placed: list[Placement] = [WHOLE] * len(recording.tensors)
        touched: set[int] = set()
        for name, placement in plan.items():
            placed[recording.parameters[name]] = self._one(placement)
            touched.add(recording.parameters[name])
        for number in recording.entering if watch is None and not all_whole else ():
            enters = self._between.placement(recording.tensors[number].shape)
            if isinstance(enters, Cut):
                placed[number] = self._one(enters)
                touched.add(number)
        memories = list(recording.memories)
        seen = [False] * len(placed)
        known: set[int] = set()
        recent: list[tuple[Any, ...]] = []
        group.cuts.clear()
        passed = Passed()
        for operation, whole_work_s in zip(recording.operations, self._whole_work_s, strict=True):
            if operation.index == recording.num_forward:
                passed.forward_work_s = passed.work_s
                recent = []
            if touched.isdisjoint(operation.inputs):
                passed.work_s += whole_work_s
                continue
            if watch is not None and operation.index >= recording.num_forward:
                break
            if operation.func is None:
                for number in operation.inputs:
                    leaves = self._between.placement(recording.tensors[number].shape)
                    passed.exchange_s += self._time_s(number, placed[number], leaves)
                continue
            way = self._way(operation, placed, memories, known, recent)
            passed.work_s += way.work_s
            passed.exchange_s += way.exchange_s
            for number, time_s in way.sums:
                if memories[number] in known and self._covers[number]:
                    continue
                passed.exchange_s += time_s
                if not seen[number]:
                    placed[number] = WHOLE
                elif self._covers[number]:
                    known.add(memories[number])
            for number, time_s, cut in way.scatters:
                passed.exchange_s += time_s
                if not seen[number]:
                    placed[number] = self._one(cut)
            for number, time_s in way.gathers:
                key = self._part_key(number, placed, memories)
                if key in recent:
                    recent.remove(key)
                else:
                    passed.exchange_s += time_s
                recent = [*recent, key][-MOST_KEPT:]
            for number in way.written:
                known.discard(memories[number])
                recent = [key for key in recent if key[0] != memories[number]]
            base = operation.inputs[0] if operation.inputs else None
            for number, placement in way.outputs:
                placed[number] = placement
                if placement is not WHOLE:
                    touched.add(number)
                if base is not None and memories[number] == memories[base] and number != base:
                    seen[number] = seen[base] = True
                    if way.copies:
                        memories[number] = -1 - number
            group.cuts.update(way.cuts)
            for number, cut in way.wants:
                self._want(passed, number, cut)
            if watch is not None and any(isinstance(placed[each], Cut) for each in operation.inputs):
                watch(operation, placed)
        if recording.num_forward == len(recording.operations):
            passed.forward_work_s = passed.work_s
        if watch is None:
            self._settle(passed, placed)
        return passed

    def _settle(self, passed: Passed, placed: list[Placement]) -> None:
        recording = self.recording
        for name, number in recording.gradients.items():
            target = placed[recording.parameters[name]]
            passed.settle_s += self._time_s(number, placed[number], target)
            found = placed[number]
            if isinstance(target, Whole) and isinstance(found, Cut):
                _add(passed.wants, name, found)

    def _want(self, passed: Passed, number: int, cut: Cut) -> None:
        view = self._parameter_views.get(number)
        if view is not None:
            name, dims = view
            if (dim := dims[cut.dim]) is not None:
                _add(passed.wants, name, cut.at(dim))

    def _time_s(self, number: int, source: Placement, target: Placement) -> float:
        tensor = self.recording.tensors[number]
        return self._group.time_s(tuple(tensor.shape), tensor.element_size(), source, target)

    def _one(self, placement: Placement) -> Placement:
        return self._placements.setdefault(placement, placement)

    # ---- one operation ----

    def _whole_work(self, operation: Operation) -> float:
        """Seconds of an operation on whole tensors."""
        if operation.func is None:
            return 0.0
        count = len(operation.inputs)
        nothing = (False,) * count
        call = _RecordedCall(operation, (WHOLE,) * count, nothing, nothing, self._group)
        return _work_s(call, choose(call)[0])

    def _part_key(self, number: int, placed: list[Placement], memories: list[int]) -> tuple[Any, ...]:
        """What parts have in common that are gathered once."""
        tensor, cut = self.recording.tensors[number], placed[number]
        assert isinstance(cut, Cut)
        order = order_of(tensor.shape, tensor.stride())
        sizes = tuple([(tensor.shape[dim], tensor.stride(dim)) for dim in order])
        return memories[number], tensor.storage_offset(), sizes, order.index(cut.dim), cut.runs

    def _way(
        self,
        operation: Operation,
        placed: list[Placement],
        memories: list[int],
        known: set[int],
        recent: list[tuple[Any, ...]],
    ) -> _Way:
        placements = tuple([placed[each] for each in operation.inputs])
        key: tuple[Any, ...] = (operation.index, *map(id, placements))
        sums: tuple[bool, ...] = (False,) * len(placements)
        if known or recent:
            sums = tuple(
                memories[each] in known and self._covers[each]
                if isinstance(placed[each], PartialSum)
                else isinstance(placed[each], Cut) and self._part_key(each, placed, memories) in recent
                for each in operation.inputs
            )
            key = (*key, sums)
        if operation.name in _HEED_CUTS:
            key = (*key, tuple(self._group.cuts.items()))
        way = self._ways.get(key)
        if way is None:
            way = self._ways[key] = self._decided(operation, placements, sums)
        return way

    def _decided(
        self, operation: Operation, placements: tuple[Placement, ...], known: tuple[bool, ...]
    ) -> _Way:
        group = self._group
        earlier, noted = group.cuts, dict[tuple[Any, ...], Cut]()
        group.cuts = ChainMap(noted, earlier)
        lasting = [self.recording.memories[each] in self._lasting for each in operation.inputs]
        call = _RecordedCall(operation, placements, known, lasting, group)
        candidate, has_rule = choose(call)
        group.cuts = earlier
        decision = Decision(call, candidate, operation.args, has_rule=has_rule)
        way = _Way(
            work_s=_work_s(call, candidate),
            exchange_s=0.0,
            sums=[],
            scatters=[],
            gathers=[],
            outputs=[],
            wants=[],
            written=[operation.inputs[index] for index in sorted(call.written)],
            copies=call.is_view and bool(placements) and candidate.inputs[0] != placements[0],
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
                way.outputs.append((result, self._one(candidate.outputs[index])))
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


def _add(wants: dict[str, list[Cut]], name: str, cut: Cut) -> None:
    found = wants.setdefault(name, [])
    if cut not in found:
        found.append(cut)


def _covers_its_memory(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _parameter_views(recording: Recording) -> dict[int, tuple[str, tuple[int | None, ...]]]:
    """Transposed parameters: which parameter it is, and which of its dimensions each dimension is."""
    by_memory = {recording.memories[number]: name for name, number in recording.parameters.items()}
    found: dict[int, tuple[str, tuple[int | None, ...]]] = {}
    for number, tensor in enumerate(recording.tensors):
        name = by_memory.get(recording.memories[number])
        if name is None:
            continue
        parameter = recording.tensors[recording.parameters[name]]
        own = list(zip(parameter.shape, parameter.stride(), strict=True))
        if tensor.numel() == parameter.numel():
            dims = zip(tensor.shape, tensor.stride(), strict=True)
            found[number] = name, tuple(own.index(each) if each in own else None for each in dims)
    return found
