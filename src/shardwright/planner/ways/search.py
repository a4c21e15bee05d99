"""Searches for the best ways to train: prices all, drops what does not fit, prefers the simplest.

`largest_batch`: gradient accumulation trains any batch; memory bounds what is in flight at the same time: a
microbatch per replica, and in a pipeline as many as it has ranks.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardwright.catalogue import LayerChain
from shardwright.cluster import memory_for
from shardwright.costs import Options, Recompute, Sharded
from shardwright.errors import ConfigError, InfeasiblePlanError
from shardwright.planner.ways.space import NAMES, all_ways
from shardwright.planner.ways.task import MOST_BATCH, Task
from shardwright.planner.ways.way import Way, fits, memory_of, prices_of, way_of, with_least_recomputation
from shardwright.quantities import format_bytes

_Objective = Literal["speed", "memory"]

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
        num_fitting: of them, those that fit in memory.
    """

    task: Task
    best: Way
    alternatives: tuple[Way, ...]
    num_ways: int
    num_fitting: int


def search(task: Task, *, objective: _Objective = "speed") -> Answer:
    """Finds the fastest way, or the one that takes least memory."""
    ways = all_ways(task)
    fitting = np.flatnonzero(fits(task, ways))
    if not len(fitting):
        raise InfeasiblePlanError(_nothing_fits(task, ways, np.asarray(memory_of(task, ways)[0].total)))
    return _best_of(task, ways.take(fitting), objective=objective, num_ways=len(ways.pipeline))


def _best_of(task: Task, some: Options, *, objective: _Objective, num_ways: int) -> Answer:
    """The best of ways that fit, and those that are next."""
    number = len(np.atleast_1d(some.pipeline))
    if objective == "speed":
        some = _with_roomy_ones(task, some)
    prices = prices_of(task, some)
    seconds = np.broadcast_to(prices.seconds.total, np.shape(some.pipeline))
    needed, limit = prices.num_bytes, prices.limit
    score = seconds if objective == "speed" else np.asarray(needed.total)
    order = _order(score, simplicity(some) + _RISK * (needed.total > _FULL_MEMORY * limit), seconds)
    chosen = _apart(some, order)
    found = [way_of(task, _one(some, number)) for number in chosen]
    return Answer(
        task=task,
        best=found[0],
        alternatives=tuple(found[1:]),
        num_ways=num_ways,
        num_fitting=number,
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


def _apart(ways: Options, order: NDArray[np.intp]) -> list[int]:
    """The best, and the best of other degrees."""
    degrees = np.stack([ways.tensor, ways.pipeline, ways.data, ways.shard, ways.context, ways.expert])
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
    return Options(**{name: float(getattr(ways, name)[number]) for name in NAMES})


def closest_way(task: Task, ways: Options, needed: NDArray[np.float64]) -> Way:
    """The way with the least memory, of ways that need so many bytes."""
    return way_of(task, _one(ways, int(np.argmin(needed))))


def _nothing_fits(task: Task, ways: Options, needed: NDArray[np.float64]) -> str:
    closest = closest_way(task, ways, needed)
    if closest.peak_bytes <= closest.limit_bytes:
        raise InfeasiblePlanError(
            f"nothing of {len(needed)} ways fits: {closest.title} needs {format_bytes(closest.peak_bytes)} a "
            f"rank, but what it offloads is more than the {format_bytes(task.host_bytes)} of the host's "
            "memory that a rank may use. Take hosts with more memory, or offload less."
        )
    lines = [
        f"nothing of {len(needed)} ways fits in {format_bytes(closest.limit_bytes)} a rank. The closest "
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
    more = next((f for f in _FACTORS if _any_fits(_with_nodes(task, f))), None)
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
        found.append(
            "Experts shared beside shards, or offload of optimizer state, which this version does not run "
            "yet."
        )
    return found


def _any_fits(task: Task) -> bool:
    try:
        ways = all_ways(task)
    except ConfigError:
        return False  # for example, a batch that more replicas do not divide
    return bool(fits(task, ways).any())


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
    return _best_of(replace(task, batch=largest), found, objective="speed", num_ways=len(batches))


def ways_at_once(task: Task) -> Options:
    """All ways apart from their batch: a microbatch for each rank of a pipeline, of one sample."""
    ways = all_ways(replace(task, batch=task.machines.num_ranks))
    return _with(ways.take(np.flatnonzero(ways.microbatch == 1)), np.ones(1))


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
