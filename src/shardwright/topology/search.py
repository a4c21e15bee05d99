"""Searches for the best ways to train: prices all, drops what does not fit, prefers the simplest."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardwright.costs import Options, Recompute, Sharded
from shardwright.errors import InfeasiblePlanError
from shardwright.quantities import format_bytes
from shardwright.topology.least_recomputation import with_least_recomputation
from shardwright.topology.pricing import bytes_of, fits, memory_of, seconds_of
from shardwright.topology.remedies import remedies
from shardwright.topology.space import NAMES, all_ways
from shardwright.topology.task import Task
from shardwright.topology.way import Way, way_of

__all__ = ["NEAR_TIE", "Answer", "Objective", "best_of", "closest_way", "drawbacks", "search"]

Objective = Literal["speed", "memory"]

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


def search(task: Task, *, objective: Objective = "speed") -> Answer:
    """Finds the fastest way, or the one that takes least memory."""
    ways = all_ways(task)
    fitting = np.flatnonzero(fits(task, ways))
    if not len(fitting):
        raise InfeasiblePlanError(_nothing_fits(task, ways, np.asarray(bytes_of(task, ways).total)))
    return best_of(task, ways.take(fitting), objective=objective, num_ways=len(ways.pipeline))


def best_of(task: Task, some: Options, *, objective: Objective, num_ways: int) -> Answer:
    """The best of ways that fit, and those that are next."""
    number = len(np.atleast_1d(some.pipeline))
    if objective == "speed":
        some = _with_roomy_ones(task, some)
    seconds = np.broadcast_to(_seconds(task, some), np.shape(some.pipeline))
    needed, limit = memory_of(task, some)
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
    """The ways with the least recomputation; behind them those near the best with memory to spare.

    Recomputing a layer more may be all that parts a simple way from one that has a tenth of the memory free.
    """
    least = with_least_recomputation(task, some)
    number = len(some.pipeline)
    seconds = np.broadcast_to(_seconds(task, least), (number,))
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


def _seconds(task: Task, ways: Options) -> NDArray[np.float64]:
    return np.asarray(seconds_of(task, ways).total)


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
        *remedies(task, closest),
    ]
    return "\n  ".join(lines)
