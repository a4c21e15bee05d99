"""Corrects the costs of units by the seconds that stages took in a run.

A step shows the seconds of a stage, not those of its units. Kinds of units that several stages have tell the
rest apart::

    stage 0    embed + 4 blocks     planned 4.1    took 6.1
    stage 1    4 blocks + head      planned 5.0    took 5.0        the blocks are right, so embed took 2.1

The factors solve this as nearly as they can. Where several sets of factors do, they are those nearest to 1
(the least sum of squared logarithms). The next run, with other cuts, tells more apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from shardwright.model_graph import ModelGraph
from shardwright.plan import Plan
from shardwright.planner.chain.chain import Floats
from shardwright.profile import Profile

__all__ = ["corrected_profile", "factors_of_units", "seconds_of_stages", "seconds_of_units"]

LEAST_PARTING = 1.1
"""Stages whose measured over planned seconds differ by less are taken to be as planned: so much is noise."""

_MOST = 1000.0
"""Of a factor, and of its inverse."""

_ROUNDS = 50
_LONGEST_STEP = 0.5
_LEAST_SHARE = 0.1
"""Of a stage's seconds that units have at least, where operations between them are planned to take all."""


def seconds_of_stages(graph: ModelGraph, profile: Profile, plan: Plan) -> tuple[float, ...]:
    """Planned seconds of each stage for one microbatch: forward, backward, recomputation."""
    of_kinds, rest = _seconds(graph, profile, plan)
    return tuple(float(sum(kinds.values()) + other) for kinds, other in zip(of_kinds, rest, strict=True))


def seconds_of_units(graph: ModelGraph, profile: Profile) -> dict[str, float]:
    """Planned seconds of each unit call for one microbatch, forward and backward, by label."""
    return {
        node.label: cost.forward_s + cost.backward_s
        for node in graph.nodes
        if node.kind == "unit" and (cost := profile.costs.get(node.cost_class)) is not None
    }


def factors_of_units(
    graph: ModelGraph, profile: Profile, plan: Plan, stage_s: Sequence[float]
) -> dict[str, float]:
    """Factors on the seconds of unit calls, by label; none where stages took what was planned.

    Where the costs were measured, the factors leave the sum over all stages as it is: how busy a machine is
    changes from run to run, and past runs correct for it. Of estimates, the sum is corrected, too.

    Args:
        graph: of a microbatch of the plan.
        profile: that the plan was made with.
        plan: that the run followed.
        stage_s: measured seconds of each stage for one microbatch, forward and backward.
    """
    of_kinds, rest = _seconds(graph, profile, plan)
    planned = np.array([sum(kinds.values()) for kinds in of_kinds]) + rest
    measured = np.array(stage_s)
    if len(of_kinds) < 2 or not (planned > 0).all() or not (measured > 0).all():
        return {}
    ratios = measured / planned
    level, kept_level = measured.sum() / planned.sum(), 1.0
    if plan.prediction is not None and plan.prediction.provenance == "estimated":
        kept_level = level
        ratios = np.append(ratios, 1.0)
    if ratios.max() / ratios.min() < LEAST_PARTING:
        return {}
    kinds = sorted({kind for of_stage in of_kinds for kind in of_stage})
    seconds = np.array([[of_stage.get(kind, 0.0) for kind in kinds] for of_stage in of_kinds])
    of_units = np.maximum(measured / level - rest, _LEAST_SHARE * measured / level)
    factors = dict(zip(kinds, (kept_level * _solve(seconds, of_units)).tolist(), strict=True))
    return {node.label: factors[node.cost_class] for node in graph.nodes if node.kind == "unit"}


def corrected_profile(profile: Profile, graph: ModelGraph, factors: Mapping[str, float]) -> Profile:
    """The profile with the seconds of units multiplied by the factors of their calls.

    Calls of one kind have one factor where these come from the same units. Of others, in a graph that is cut
    into other units, the mean counts.
    """
    of_kinds: dict[str, list[float]] = {}
    for node in graph.nodes:
        if node.kind == "unit" and node.label in factors:
            of_kinds.setdefault(node.cost_class, []).append(factors[node.label])
    costs = dict(profile.costs)
    for kind, found in of_kinds.items():
        if kind in costs:
            costs[kind] = costs[kind].scaled(seconds=sum(found) / len(found), num_bytes=1.0)
    return replace(profile, costs=costs)


def _solve(seconds: Floats, measured: Floats) -> Floats:
    """Factors of kinds whose seconds in each stage come near to the measured ones, by Gauss and Newton.

    Args:
        seconds: of stages x kinds.
        measured: of stages.
    """
    logs = np.zeros(seconds.shape[1])
    for _ in range(_ROUNDS):
        of_kinds = seconds * np.exp(logs)
        wanted = measured - of_kinds.sum(axis=1) + of_kinds @ logs
        solved, *_ = np.linalg.lstsq(of_kinds, wanted)  # the shortest one, where there are several
        step = np.clip(solved - logs, -_LONGEST_STEP, _LONGEST_STEP)
        logs = np.clip(logs + step, -np.log(_MOST), np.log(_MOST))
    return np.exp(logs)


def _seconds(graph: ModelGraph, profile: Profile, plan: Plan) -> tuple[list[dict[str, float]], Floats]:
    """For each stage, seconds by kind of unit, and those of the operations between units."""
    stage_of = {label: stage for stage, planned in enumerate(plan.stages) for label in planned.units}
    recomputed = {label for planned in plan.stages for label in planned.recompute}
    labels = graph.labels
    of_kinds: list[dict[str, float]] = [{} for _ in plan.stages]
    rest = np.zeros(len(plan.stages))
    for node, home in zip(graph.nodes, graph.home_calls(), strict=True):
        cost = profile.costs.get(node.cost_class)
        stage = None if home is None else stage_of.get(labels[home])
        if cost is None or stage is None:
            continue
        if node.kind == "op":
            rest[stage] += cost.forward_s + cost.backward_s
            continue
        again_s = cost.forward_s if node.label in recomputed else 0.0
        kinds = of_kinds[stage]
        kinds[node.cost_class] = kinds.get(node.cost_class, 0.0) + cost.forward_s + cost.backward_s + again_s
    return of_kinds, rest
