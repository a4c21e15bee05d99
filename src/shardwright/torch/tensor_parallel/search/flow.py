"""Follows placements through a recorded step, without running it; which cuts are worth a try.

Each operation is decided as the run decides it, and the decision is kept by the placements of its inputs: of
two plans that differ in one matrix, most operations are decided already. So a plan takes milliseconds.

A fused projection of queries, keys and values is known by what becomes of its result: one dimension is split
in three, and each piece is seen as heads. So each of the three segments is cut, between heads::

    weight (3 * 12, 48)  ──►  result (..., 36)  ──split──►  3 x (..., 12)  ──view──►  3 x (..., 4 heads, 3)

    segments 12 12 12, in steps of 3, over two ranks:     r0:6 r1:6 r0:6 r1:6 r0:6 r1:6

The rules of the run say where the dimension goes: one parameter is cut, all others are whole, and views of
what is cut are looked at.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

from torch import Tensor

from shardwright.placement import WHOLE, BetweenUnits, Cut, PartialSum, Placement, Whole
from shardwright.torch.tensor_parallel.group import MOST_KEPT, TensorGroup, order_of
from shardwright.torch.tensor_parallel.search.recording import Operation, Recording
from shardwright.torch.tensor_parallel.search.ways import Way, Ways
from shardwright.torch.tensor_parallel.spec import matching_dims


@dataclass(slots=True)
class _Passed:
    """What became of a plan in a step.

    Attributes:
        work_s: of the busiest rank, operation by operation.
        forward_work_s: the part of it in the forward.
        settle_s: to give gradients the placements of their parameters, once a step.
        wants: cuts in which whole parameters were used, or got their gradients, by name.
    """

    work_s: float = 0.0
    forward_work_s: float = 0.0
    exchange_s: float = 0.0
    settle_s: float = 0.0
    wants: dict[str, list[Cut]] = field(default_factory=dict)


@dataclass(slots=True)
class _Pass:
    """A plan on its way through the operations of a step.

    Attributes:
        placed: where each tensor is, by number.
        touched: tensors that are not whole, or were not.
        memories: of each tensor; a view with memory of its own has another one than in the recording.
        seen: of each tensor, whether another one shares its memory.
        known: memories whose pending sum ranks have taken.
        recent: parts that were gathered, and are kept, the last one last (see `Flow._part_key`).
    """

    placed: list[Placement]
    touched: set[int]
    memories: list[int]
    seen: list[bool]
    known: set[int] = field(default_factory=set)
    recent: list[tuple[Any, ...]] = field(default_factory=list)


class Flow:
    """Follows placements of parameters through one recording."""

    def __init__(self, recording: Recording, group: TensorGroup, between: BetweenUnits | None = None):
        self.recording = recording
        self._group = group
        self._between = between or BetweenUnits(group.num_ranks)
        group.shares(self._between)
        self._ways = Ways(recording, group, self._between)
        self._parameter_views = _parameter_views(recording)
        self._covers = [_covers_its_memory(each) for each in recording.tensors]
        # Most operations of most plans see nothing divided.
        self._whole_work_s = [self._ways.whole_work_s(each) for each in recording.operations]

    def run(
        self,
        plan: Mapping[str, Placement],
        *,
        watch: Callable[[Operation, list[Placement]], None] | None = None,
        all_whole: bool = False,
    ) -> _Passed:
        recording = self.recording
        state = self._begin(plan, enters=watch is None and not all_whole)
        passed = _Passed()
        for operation, whole_work_s in zip(recording.operations, self._whole_work_s, strict=True):
            if operation.index == recording.num_forward:
                passed.forward_work_s = passed.work_s
                state.recent = []
            if state.touched.isdisjoint(operation.inputs):
                passed.work_s += whole_work_s
                continue
            if watch is not None and operation.index >= recording.num_forward:
                break
            if operation.func is None:
                for number in operation.inputs:
                    leaves = self._between.placement(recording.tensors[number].shape)
                    passed.exchange_s += self._time_s(number, state.placed[number], leaves)
                continue
            way = self._way(operation, state)
            passed.work_s += way.work_s
            passed.exchange_s += way.exchange_s
            self._exchange(way, state, passed)
            self._place(operation, way, state)
            for number, cut in way.wants:
                self._want(passed, number, cut)
            if watch is not None and any(isinstance(state.placed[each], Cut) for each in operation.inputs):
                watch(operation, state.placed)
        if recording.num_forward == len(recording.operations):
            passed.forward_work_s = passed.work_s
        if watch is None:
            self._settle(passed, state.placed)
        return passed

    def _begin(self, plan: Mapping[str, Placement], *, enters: bool) -> _Pass:
        """The state before the first operation."""
        recording = self.recording
        placed: list[Placement] = [WHOLE] * len(recording.tensors)
        touched: set[int] = set()
        for name, placement in plan.items():
            placed[recording.parameters[name]] = self._ways.one(placement)
            touched.add(recording.parameters[name])
        for number in recording.entering if enters else ():
            found = self._between.placement(recording.tensors[number].shape)
            if isinstance(found, Cut):
                placed[number] = self._ways.one(found)
                touched.add(number)
        self._group.cuts.clear()
        return _Pass(placed, touched, list(recording.memories), [False] * len(placed))

    def _exchange(self, way: Way, state: _Pass, passed: _Passed) -> None:
        """Takes what an operation makes whole, or cuts, of what others see, too."""
        memories = state.memories
        for number, time_s in way.sums:
            if memories[number] in state.known and self._covers[number]:
                continue
            passed.exchange_s += time_s
            if not state.seen[number]:
                state.placed[number] = WHOLE
            elif self._covers[number]:
                state.known.add(memories[number])
        for number, time_s, cut in way.scatters:
            passed.exchange_s += time_s
            if not state.seen[number]:
                state.placed[number] = self._ways.one(cut)
        for number, time_s in way.gathers:
            key = self._part_key(number, state)
            if key in state.recent:
                state.recent.remove(key)
            else:
                passed.exchange_s += time_s
            state.recent = [*state.recent, key][-MOST_KEPT:]
        for number in way.written:
            state.known.discard(memories[number])
            state.recent = [key for key in state.recent if key[0] != memories[number]]

    def _place(self, operation: Operation, way: Way, state: _Pass) -> None:
        memories, seen = state.memories, state.seen
        base = operation.inputs[0] if operation.inputs else None
        for number, placement in way.outputs:
            state.placed[number] = placement
            if placement is not WHOLE:
                state.touched.add(number)
            if base is not None and memories[number] == memories[base] and number != base:
                seen[number] = seen[base] = True
                if way.copies:
                    memories[number] = -1 - number
        self._group.cuts.update(way.cuts)

    def _settle(self, passed: _Passed, placed: list[Placement]) -> None:
        recording = self.recording
        for name, number in recording.gradients.items():
            target = placed[recording.parameters[name]]
            passed.settle_s += self._time_s(number, placed[number], target)
            found = placed[number]
            if isinstance(target, Whole) and isinstance(found, Cut):
                _add(passed.wants, name, found)

    def _want(self, passed: _Passed, number: int, cut: Cut) -> None:
        view = self._parameter_views.get(number)
        if view is not None:
            name, dims = view
            if (dim := dims[cut.dim]) is not None:
                _add(passed.wants, name, cut.at(dim))

    def _time_s(self, number: int, source: Placement, target: Placement) -> float:
        tensor = self.recording.tensors[number]
        return self._group.time_s(tuple(tensor.shape), tensor.element_size(), source, target)

    def _part_key(self, number: int, state: _Pass) -> tuple[Any, ...]:
        """What parts have in common that are gathered once."""
        tensor, cut = self.recording.tensors[number], state.placed[number]
        assert isinstance(cut, Cut)
        order = order_of(tensor.shape, tensor.stride())
        sizes = tuple([(tensor.shape[dim], tensor.stride(dim)) for dim in order])
        return state.memories[number], tensor.storage_offset(), sizes, order.index(cut.dim), cut.runs

    def _way(self, operation: Operation, state: _Pass) -> Way:
        placed = state.placed
        at_hand: tuple[bool, ...] | None = None
        if state.known or state.recent:
            at_hand = tuple(
                state.memories[each] in state.known and self._covers[each]
                if isinstance(placed[each], PartialSum)
                else isinstance(placed[each], Cut) and self._part_key(each, state) in state.recent
                for each in operation.inputs
            )
        return self._ways.of(operation, tuple([placed[each] for each in operation.inputs]), at_hand)


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


_Structure = tuple[tuple[int, ...], int]
"""Lengths of the segments of a dimension, and the step in which each may be cut."""

_MAX_SEGMENTS = 8
_MAX_CANDIDATES = 6

_RESHAPES = frozenset(["view", "_unsafe_view", "_reshape_alias"])
_SPLITS = frozenset(["split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"])


def cut_candidates(flow: Flow, name: str, dim: int, num_ranks: int) -> list[Cut]:
    """Cuts of one dimension of a parameter, those that the step suggests before the plain one."""
    size = flow.recording.tensors[flow.recording.parameters[name]].shape[dim]
    plain = Cut.even(dim, size, num_ranks=num_ranks)
    structures: dict[_Structure, None] = {((size,), 1): None}
    tried: dict[Cut, None] = {}
    # What a cut shows may tell of a better one, which comes further.
    for structure in _growing(structures):
        cut = _cut_of(structure, dim, num_ranks)
        if cut in tried or len({run.rank for run in cut.runs}) < 2:
            continue
        if len(tried) >= _MAX_CANDIDATES:
            break
        tried[cut] = None
        for found in _seen(flow, name, cut, size, list(structures)):
            structures[found] = None
    return [*(cut for cut in tried if cut != plain), plain] if plain in tried else list(tried)


def _growing(structures: dict[_Structure, None]) -> Iterator[_Structure]:
    done: set[_Structure] = set()
    while missing := [each for each in structures if each not in done]:
        done.add(missing[0])
        yield missing[0]


def _cut_of(structure: _Structure, dim: int, num_ranks: int) -> Cut:
    lengths, step = structure
    return Cut.in_segments(dim, [each // step for each in lengths], num_ranks=num_ranks).times(step)


def _seen(flow: Flow, name: str, cut: Cut, size: int, known: list[_Structure]) -> list[_Structure]:
    """What views of the cut dimension, and of pieces of it, say of its structure."""
    found: dict[_Structure, None] = {}
    steps: dict[int, None] = {}
    bounds: set[int] = set()

    def watch(operation: Operation, placed: list[Placement]) -> None:
        own = placed[operation.inputs[0]]
        if not isinstance(own, Cut):
            return
        tensor = flow.recording.tensors[operation.inputs[0]]
        length = own.size
        for lengths, step in _structures_at(operation, tuple(tensor.shape), own.dim):
            if length == size:
                found[lengths, step] = None
            elif len(lengths) == 1:
                steps[step] = None
        if operation.name == "slice" and length == size and operation.args[1:2] == (own.dim,):
            start, stop, _ = slice(*operation.args[2:4]).indices(size)
            bounds.update((start, stop))

    flow.run({name: cut}, watch=watch)
    if bounds:
        edges = sorted({0, size, *bounds})
        found[tuple(b - a for a, b in pairwise(edges)), 1] = None
    for lengths, _ in [*known, *found]:
        for step in steps:
            found[lengths, step] = None
    return [
        (lengths, step)
        for lengths, step in found
        if len(lengths) <= _MAX_SEGMENTS and all(each % step == 0 for each in lengths)
    ]


def _structures_at(operation: Operation, shape: tuple[int, ...], dim: int) -> list[_Structure]:
    """The segments and steps that an operation gives a dimension of its first input."""
    size = shape[dim]
    if operation.name in _SPLITS:
        outputs = [each for each in operation.outputs if each is not None]
        lengths = tuple(each.shape[dim] for each in outputs)
        return [(lengths, 1)] if sum(lengths) == size and len(lengths) > 1 else []
    if operation.name not in _RESHAPES or operation.outputs[0] is None or not prod(shape):
        return []
    new_shape = tuple(operation.outputs[0].shape)
    for dims, new_dims in matching_dims(shape, new_shape):
        if dims == [dim]:
            sizes = [new_shape[each] for each in new_dims]
            return [
                ((size // prod(sizes[:place]),) * prod(sizes[:place]), prod(sizes[place + 1 :]))
                for place, each in enumerate(sizes)
                if each > 1 and len(sizes) > 1
            ]
    return []
