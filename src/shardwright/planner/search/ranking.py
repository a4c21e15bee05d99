"""Ranks options: by time and memory, and near the best by simplicity; the plan of the last run stays.

Predictions err. Two plans of one model err alike in most, so a simpler one is taken within the error of a
*comparison*. A plan that has run before stays within the error of a *prediction*: another one changes
microbatches and cuts, and with them results in their last bits.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence

from shardwright.model_graph import ModelGraph
from shardwright.plan import Plan
from shardwright.planner.chain.estimate import MEASURED_ERROR, error_of
from shardwright.planner.partition.blocks import nesting_of
from shardwright.planner.search.draft import Draft
from shardwright.planner.search.option import Option
from shardwright.profile import Profile

__all__ = ["SIMPLICITY", "cuts_of", "error_of_comparison", "is_of", "kept_plan", "rank"]

SIMPLICITY = ("1f1b", "gpipe", "zb_h1", "interleaved_1f1b", "zb_v")
"""Schedule families in the order of simplicity. 1F1B needs less memory than GPipe for the same time."""

_LEAST_ERROR = 0.01


def error_of_comparison(candidates: Iterable[tuple[ModelGraph, Profile]]) -> float:
    """The share by which two plans may differ by chance: half of the spread of a step's measured seconds.

    It is 1 % at least, and no more than the error of a prediction.
    """
    spread_s = whole_s = 0.0
    for graph, profile in candidates:
        for node in graph.nodes:
            cost = profile.costs.get(node.cost_class)
            if cost is not None and node.kind == "unit":
                seconds = cost.forward_s + cost.backward_s
                spread_s, whole_s = spread_s + seconds * cost.spread / 2, whole_s + seconds
    error = spread_s / whole_s if whole_s > 0 else 0.0
    return min(max(error, _LEAST_ERROR), MEASURED_ERROR)


def rank(
    options: Sequence[Option], *, memory_weight: float, near_tie: float = 1.0 + _LEAST_ERROR
) -> list[Option]:
    """The options, best first: by time (and memory, by its weight); near the best, the simplest.

    An option whose cuts fall between blocks is simpler than one whose cuts run through them.
    """
    score = _scores(options, memory_weight)

    def simplicity(option: Option) -> tuple[int, int, int, int, int]:
        layout = option.layout
        nesting = sum(nesting_of(layout.chain.labels, cut) for cut in layout.cuts[1:-1])
        recomputed = int(layout.recompute.sum())
        if layout.offload is not None:
            recomputed += int(layout.offload.sum())
        family = SIMPLICITY.index(option.kind)
        return nesting, layout.num_stages, family, recomputed, option.num_microbatches

    best = min(score(option) for option in options)
    near = [option for option in options if score(option) <= best * near_tie]
    far = [option for option in options if score(option) > best * near_tie]
    return sorted(near, key=lambda o: (simplicity(o), score(o))) + sorted(
        far, key=lambda o: (score(o), simplicity(o))
    )


def _scores(options: Sequence[Option], memory_weight: float) -> Callable[[Option], float]:
    """Rates an option by time and memory, each relative to the least of all."""
    least_s = min(option.step_s for option in options) or 1.0
    least_bytes = min(option.peak_bytes for option in options) or 1

    def score(option: Option) -> float:
        time, memory = option.step_s / least_s, option.peak_bytes / least_bytes
        return (1 - memory_weight) * time + memory_weight * memory

    return score


def kept_plan(
    best: Option, fitting: Sequence[Option], previous: Plan | None, *, memory_weight: float
) -> Option | None:
    """The option that the previous plan is, unless the best one is better by more than predictions err."""
    same = [option for option in fitting if is_of(previous, option)]
    if not same:
        return None
    error = error_of(best.layout.chain.provenance, best.workload.fabric.cluster.device)
    score = _scores(fitting, memory_weight)
    kept = min(same, key=score)
    return kept if score(kept) <= score(best) * (1.0 + error) else None


def is_of(plan: Plan | None, option: Option | Draft) -> bool:
    """Whether a plan has these stages, on these ranks, with this schedule."""
    if plan is None or plan.schedule.kind != option.kind:
        return False
    layout = option.layout
    return (
        plan.schedule.microbatches == option.workload.num_microbatches
        and plan.stage_ranks == layout.ranks
        and cuts_of(plan) == tuple(layout.cuts)
    )


def cuts_of(plan: Plan) -> tuple[int, ...]:
    """Positions of the calls at which the stages of a plan begin, and the number of calls."""
    return (0, *itertools.accumulate(len(stage.units) for stage in plan.stages))
