"""Searches for the best ways to train: prices all, drops what does not fit, prefers the simplest.

`largest_batch`: gradient accumulation trains any batch; memory bounds what is in flight at the same time: a
microbatch per replica, and in a pipeline as many as it has ranks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardwright.catalogue import LayerChain
from shardwright.cluster import memory_for
from shardwright.costs import Offload, Options, Recompute, ScheduleKind, Sharded
from shardwright.errors import ConfigError, InfeasiblePlanError
from shardwright.planner.ways.space import NAMES, completed, meshes, num_ways, scheduled
from shardwright.planner.ways.task import MOST_BATCH, Task
from shardwright.planner.ways.way import Way, fits, memory_of, prices_of, way_of, with_least_recomputation
from shardwright.quantities import MOST_RANKS, format_bytes

_Objective = Literal["speed", "memory"]
_Found = TypeVar("_Found")

NEAR_TIE = 1.05
"""Two ways on the same machines whose times differ by less may change places in practice."""

_FULL_MEMORY = 0.9
"""Above this share of the memory, a longer sample or a fragmented heap ends the run."""

_NUM_ALTERNATIVES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a search.

    Attributes:
        alternatives: the best of those that differ from it and from one another in their degrees.
        num_priced: of the ways, those that had to be: of the others a bound was enough.
    """

    task: Task
    best: Way
    alternatives: tuple[Way, ...]
    num_ways: int
    num_priced: int


def search(task: Task, *, objective: _Objective = "speed") -> Answer:
    """Finds the fastest way, or the one that takes least memory."""
    some = meshes(task)
    found = _Best(task, objective)
    for ways in _in_order(task, some, objective, found.bound):
        found.add(ways)
    return found.answer(num_ways(task, some))


def widened(task: Task, find: Callable[[Task], _Found]) -> _Found:
    """The first answer of a task that leaves ways out, or of the same with fewer left out, or with none."""
    tasks = [task]
    if task.operable:
        tasks.append(replace(task, operable=False))
    if task.only_what_runs:
        tasks.append(replace(task, operable=False, only_what_runs=False))
    for each in tasks[:-1]:
        try:
            return find(each)
        except (InfeasiblePlanError, ConfigError):
            continue
    return find(tasks[-1])


def least_memory(task: Task) -> Way:
    """The way that takes least memory, whether it fits or not."""
    found = _Best(task, "memory", whether_it_fits=False)
    for ways in _in_order(task, meshes(task), "memory", found.bound):
        found.add(ways)
    return found.answer(0).best


_MESHES_AT_ONCE, _WAYS_AT_ONCE = 2**9, 2**15


def _in_order(
    task: Task, some: Options, objective: _Objective, bound: Callable[[], float]
) -> Iterator[Options]:
    """All ways that may be better than a bound, which falls, some at a time; the most promising first.

    What a mesh takes at least is known before the rest is chosen, and more of it once its schedule is.
    """
    if isinstance(task.model, LayerChain):
        yield completed(task, scheduled(task, some))
        return
    floor = _least_seconds if objective == "speed" else _least_bytes
    for part in _ascending(task, some, floor, _MESHES_AT_ONCE, bound):
        ordered = scheduled(task, part)
        states = max(1, num_ways(task, part) // len(ordered.pipeline))
        for each in _ascending(task, ordered, floor, max(1, _WAYS_AT_ONCE // states), bound):
            yield completed(task, each)


def _ascending(
    task: Task,
    some: Options,
    floor: Callable[[Task, Options], NDArray[np.float64]],
    size: int,
    bound: Callable[[], float],
) -> Iterator[Options]:
    least = floor(task, some)
    order = np.argsort(least, kind="stable")
    for start in range(0, len(order), size):
        part = order[start : start + size]
        part = part[least[part] <= bound()]
        if not len(part):
            return
        yield some.take(part)


def _least_seconds(task: Task, some: Options) -> NDArray[np.float64]:
    """Seconds that these take at least, whatever is divided, computed again and offloaded."""
    parts = prices_of(task, replace(some, shard=1.0, sharded=0, recompute=0, offload=0)).seconds
    rest = parts.all_reduce + parts.update
    if np.ndim(some.schedule) == 0:  # not chosen yet
        rest = rest + parts.bubble + parts.point_to_point + parts.imbalance
    return np.asarray(parts.total - rest)


def _least_bytes(task: Task, some: Options) -> NDArray[np.float64]:
    """Bytes that these take at least."""
    most = some.data * some.context
    if np.ndim(some.schedule) == 0:
        some = replace(some, schedule=float(ScheduleKind.ONE_F_ONE_B), virtual=1.0)
    corners = [
        replace(some, shard=most, sharded=float(kind), recompute=float(again), offload=float(offload))
        for kind in Sharded
        for again in Recompute
        for offload in Offload
    ]
    found: NDArray[np.float64] = np.min([memory_of(task, each)[0].total for each in corners], axis=0)
    return found


class _Best:
    """The best of the ways so far: those near the first, and the best with each choice of degrees."""

    def __init__(self, task: Task, objective: _Objective, *, whether_it_fits: bool = True):
        self._task = task
        self._objective = objective
        self._whether_it_fits = whether_it_fits
        self._ways: Options | None = None
        self._score = self._seconds = self._parts = np.zeros(0)
        self._num_priced = 0

    def bound(self) -> float:
        """What is above this is neither near the best nor among the alternatives."""
        if self._ways is None:
            return np.inf
        of_degrees = np.sort(self._score[_first_of_degrees(self._ways, self._score)])
        last = float(of_degrees[_NUM_ALTERNATIVES]) if len(of_degrees) > _NUM_ALTERNATIVES else np.inf
        return max(float(self._score.min()) * NEAR_TIE, last)

    def add(self, ways: Options) -> None:
        task = self._task
        self._num_priced += len(ways.pipeline)
        some = ways
        if self._whether_it_fits:
            some = ways.take(np.flatnonzero(fits(task, ways)))
        if not len(some.pipeline):
            return
        if self._objective == "speed":
            some = _with_roomy_ones(task, some)
        prices = prices_of(task, some)
        seconds = np.array(np.broadcast_to(prices.seconds.total, np.shape(some.pipeline)))
        needed = np.array(np.broadcast_to(prices.num_bytes.total, np.shape(some.pipeline)))
        parts = simplicity(some) + _RISK * (needed > _FULL_MEMORY * prices.limit)
        score = seconds if self._objective == "speed" else needed
        some = replace(some, kept_layers=np.array(np.broadcast_to(some.kept_layers, np.shape(some.pipeline))))
        if self._ways is not None:
            some = Options.together([self._ways, some])
            score, seconds, parts = (
                np.concatenate(pair)
                for pair in ((self._score, score), (self._seconds, seconds), (self._parts, parts))
            )
        kept = score <= score.min() * NEAR_TIE
        kept[_first_of_degrees(some, score)] = True
        chosen = np.flatnonzero(kept)
        self._ways = some.take(chosen)
        self._score, self._seconds, self._parts = score[chosen], seconds[chosen], parts[chosen]

    def answer(self, number: int) -> Answer:
        if self._ways is None:
            raise InfeasiblePlanError(_nothing_fits(self._task, number))
        order = _order(self._score, self._parts, self._seconds)
        found = [way_of(self._task, _one(self._ways, place)) for place in _apart(self._ways, order)]
        return Answer(
            task=self._task,
            best=found[0],
            alternatives=tuple(found[1:]),
            num_ways=number,
            num_priced=self._num_priced,
        )


def _with_roomy_ones(task: Task, some: Options) -> Options:
    """The ways with the least recomputation; behind them those near the best with memory to spare."""
    least = with_least_recomputation(task, some)
    number = len(some.pipeline)
    seconds = np.broadcast_to(prices_of(task, least).seconds.total, (number,))
    near = np.flatnonzero(seconds <= seconds.min() * NEAR_TIE)
    roomy = with_least_recomputation(task, some.take(near), share=_FULL_MEMORY)
    kept = np.broadcast_to(least.kept_layers, (number,))
    fewer = np.broadcast_to(roomy.kept_layers, near.shape)
    changed = np.flatnonzero(fewer < kept[near])
    both = some.take(np.concatenate([np.arange(number), near[changed]]))
    return replace(both, kept_layers=np.concatenate([kept, fewer[changed]]))


_RISK = 3
"""Nearly full memory, or a host that keeps up with an accelerator, weighs as much as so many parts."""


def simplicity(ways: Options) -> NDArray[np.float64]:
    """The number of parts of each way; fewer are easier to run and to understand."""
    found: NDArray[np.float64] = (
        (ways.tensor > 1).astype(float)
        + (ways.pipeline > 1)
        + (ways.virtual > 1)
        + (ways.context > 1)
        + (ways.expert > 1)
        + (ways.sharded >= Sharded.OPTIMIZER)
        + (ways.sharded >= Sharded.PARAMETERS)
        + ((ways.recompute != Recompute.NONE) & (ways.kept_layers == 0))
        + _RISK * (ways.offload > 0)
    )
    return found


def drawbacks(way: Way) -> list[str]:
    """What speaks against a way that is fast: it ..."""
    found = []
    if way.options.offload:
        found.append("keeps state in the host's memory")
    if way.peak_bytes > _FULL_MEMORY * way.limit_bytes:
        found.append(f"fills {way.peak_bytes / way.limit_bytes:.0%} of the memory")
    return found


def _order(
    score: NDArray[np.float64], parts: NDArray[np.float64], seconds: NDArray[np.float64]
) -> NDArray[np.intp]:
    """Best first; within 5 % of the best, the simplest and safest."""
    near = score <= score.min() * NEAR_TIE
    return np.lexsort((seconds, score, np.where(near, parts, 0.0), ~near))


_DEGREES = ("tensor", "pipeline", "data", "shard", "context", "expert")


def _first_of_degrees(ways: Options, score: NDArray[np.float64]) -> NDArray[np.intp]:
    """The places of the best with each choice of degrees."""
    order = np.argsort(score, kind="stable")
    degrees = np.stack([getattr(ways, name)[order] for name in _DEGREES], axis=1)
    return np.asarray(order[np.unique(degrees, axis=0, return_index=True)[1]])


def _apart(ways: Options, order: NDArray[np.intp]) -> list[int]:
    """The best, and the best of other degrees."""
    degrees = np.stack([getattr(ways, name) for name in _DEGREES])
    found: list[int] = []
    seen: set[tuple[float, ...]] = set()
    for number in order.tolist():
        key = tuple(degrees[:, number].tolist())
        if key not in seen:
            seen.add(key)
            found.append(number)
        if len(found) > _NUM_ALTERNATIVES:
            break
    return found


def _one(ways: Options, number: int) -> Options:
    values = {name: getattr(ways, name) for name in NAMES}
    return Options(**{name: float(v[number]) if np.ndim(v) else float(v) for name, v in values.items()})


def _nothing_fits(task: Task, number: int) -> str:
    closest = least_memory(task)
    if closest.peak_bytes <= closest.limit_bytes:
        raise InfeasiblePlanError(
            f"nothing of {number} ways fits: {closest.title} needs {format_bytes(closest.peak_bytes)} a "
            f"rank, but what it offloads is more than the {format_bytes(task.host_bytes)} of the host's "
            "memory that a rank may use. Take hosts with more memory, or offload less."
        )
    lines = [
        f"nothing of {number} ways fits in {format_bytes(closest.limit_bytes)} a rank. The closest "
        f"({closest.title}) needs {format_bytes(closest.peak_bytes)}: {closest.memory_text}.",
        "What would help:",
        *_remedies(task, closest),
    ]
    return "\n  ".join(lines)


_FACTORS = (2, 4, 8, 16, 32, 64, 128, 256)
_LEAST_SEQUENCE = 128


def _remedies(task: Task, closest: Way) -> list[str]:
    """One line for each thing that helps by itself, then the memory that would do."""
    found = _unpinned(task)
    few_enough = [f for f in _FACTORS if f * task.machines.num_ranks <= MOST_RANKS]
    more = next((f for f in few_enough if _any_fits(_with_nodes(task, f))), None)
    if more is not None:
        found.append(
            f"More machines: {more * task.machines.num_nodes} nodes (now {task.machines.num_nodes})."
        )
    if not isinstance(task.model, LayerChain):
        found += _shorter_samples(task)
    needed = max(memory_for(kind, closest.peak_bytes) for kind, _ in task.machines.nodes)
    found.append(f"Larger accelerators: {format_bytes(needed)} each.")
    return found


def _shorter_samples(task: Task) -> list[str]:
    sequence = int(task.shape.sequence)
    for factor in _FACTORS:
        shorter = sequence // factor
        if shorter >= _LEAST_SEQUENCE and _any_fits(replace(task, sequence=shorter)):
            return [f"Shorter samples: {shorter} tokens (now {sequence})."]
    return []


def _unpinned(task: Task) -> list[str]:
    """The pins whose removal would help."""
    found = []
    for name, value in task.pins.items():
        others = {other: pin for other, pin in task.pins.items() if other != name}
        if _any_fits(replace(task, pins=others)):
            hint = " (2: full)" if name == "recompute" and value != Recompute.FULL else ""
            found.append(f"Leave {name} to the search (now {value}){hint}.")
    if task.only_what_runs and _any_fits(replace(task, only_what_runs=False)):
        found.append("Experts shared beside shards, which this version does not run yet.")
    return found


def _any_fits(task: Task) -> bool:
    try:
        some = meshes(task)
    except ConfigError:
        return False  # for example, a batch that more replicas do not divide
    limit = np.inf if isinstance(task.model, LayerChain) else task.memory_bytes
    return any(fits(task, ways).any() for ways in _in_order(task, some, "memory", lambda: limit))


def _with_nodes(task: Task, factor: int) -> Task:
    nodes = tuple((kind, factor * number) for kind, number in task.machines.nodes)
    return replace(task, machines=replace(task.machines, nodes=nodes))


_OF_BATCHES = ("microbatch", "microbatches")


def largest_batch(task: Task) -> Answer:
    """The fastest way to train the largest multiple of the task's batch without accumulating gradients."""
    for name in _OF_BATCHES:
        if name in task.pins:
            raise ConfigError(
                f"{name} is {task.pins[name]}, but the largest batch decides how it is cut. Unpin it."
            )
    ways = ways_at_once(task)
    steps = task.batch / np.gcd(task.batch, (ways.data * ways.pipeline).astype(int))
    counts = _largest(task, ways, steps)
    batches = ways.data * ways.pipeline * steps * counts
    largest = int(batches.max(initial=0))
    if not largest:
        needed = np.asarray(memory_of(task, _with(ways, steps))[0].total).min()
        raise InfeasiblePlanError(
            f"a batch of {task.batch} samples at once fits in no way: the smallest needs "
            f"{format_bytes(needed)} a rank, of {format_bytes(task.memory_bytes)}. Take a smaller --batch, "
            "whose multiples are tried, more or larger accelerators, or the objective speed, which "
            "accumulates gradients."
        )
    chosen = np.flatnonzero(batches == largest)
    found = _with(ways, steps * counts).take(chosen)
    best = _Best(replace(task, batch=largest), "speed")
    best.add(found)
    return best.answer(len(batches))


def ways_at_once(task: Task) -> Options:
    """All ways apart from their batch: a microbatch for each rank of a pipeline, of one sample."""
    there = replace(task, batch=task.machines.num_ranks)
    some = meshes(there)
    some = some.take(np.flatnonzero(some.microbatch == 1))
    return _with(completed(there, scheduled(there, some)), np.ones(1))


def _with(ways: Options, samples: NDArray[np.float64]) -> Options:
    microbatch = np.broadcast_to(samples, ways.pipeline.shape).astype(float)
    return replace(ways, microbatch=microbatch, microbatches=ways.pipeline * 1.0)


def _largest(task: Task, ways: Options, steps: NDArray[np.float64]) -> NDArray[np.float64]:
    """The most multiples of its step in the microbatch of each way; 0 where none fits."""
    low = np.zeros(len(steps))
    high = np.floor(MOST_BATCH / (ways.data * ways.pipeline * steps)) + 1
    while (high - low > 1).any():
        middle = np.floor((low + high) / 2)
        # What has been found stays as it is.
        middle = np.where(high - low > 1, middle, np.maximum(low, 1))
        there_is_room = fits(task, _with(ways, steps * middle))
        still_open = high - low > 1
        low = np.where(still_open & there_is_room, middle, low)
        high = np.where(still_open & ~there_is_room, middle, high)
    return low
