"""Splits the seconds of a step into parts that add up to the plan's prediction.

The same rows of actions are replayed several times, each time with one more effect. The time that an effect
adds is its part, so the parts add up exactly::

    mean work of the ranks        forward, backward, recomputation, the runtime for actions, units, operations
    + the busiest rank            imbalance
    + waiting for one another     bubble (messages take no time)
    + copies to the host          of what units offload, beyond what compute hides
    + latency, bytes, copying     exposed messages: those that no compute hides
    + cores                       ranks that share them
    + sums of gradients           over stages that share parameters, over replicas
    + before and after            what the runtime does around the schedule
    = the predicted step

A longer action makes no other action start earlier, so no part is negative except the
remainder: the difference between a plan's prediction and its replay, if the plan was edited.

The memory of each rank at every moment of a simulated step.

::

    bytes      ┌──┐  ┌──┐
            ┌──┘  └──┘  └──┐        activations: more at a forward, less at the end of a backward
    ────────┴──────────────┴──── ─  parameters, gradients, optimizer state, batch: all the time
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shardwright.cluster import Link
from shardwright.plan import MemoryPrediction, Plan
from shardwright.planner.replay import Setting, base_setting, play
from shardwright.schedule import Kind, Simulation, StageCost

_PartKind = Literal[
    "compute", "recomputation", "communication", "bubble", "imbalance", "overhead", "remainder"
]

_NEGLIGIBLE = 1e-12
_EDITED = "The plan predicts another step than its own costs give: it was edited after it was made."


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a step."""

    name: str
    kind: _PartKind
    seconds: float
    meaning: str


@dataclass(frozen=True, slots=True)
class Waterfall:
    """The parts of a predicted step, in the order of the picture above.

    Attributes:
        step_s: the prediction of the plan; the sum of the parts.
    """

    parts: tuple[Part, ...]
    step_s: float

    def seconds(self, kind: _PartKind) -> float:
        return sum(part.seconds for part in self.parts if part.kind == kind)


@dataclass(frozen=True, slots=True)
class _Work(StageCost):
    """Seconds of one rank's actions by what they are, with those of the runtime."""

    overhead_s: float = 0.0
    script_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.recompute_s + self.overhead_s + self.script_s


def break_down(plan: Plan) -> Waterfall:
    setting = base_setting(plan)
    assert plan.prediction is not None
    parts = [*_work_parts(plan, setting), *_waiting_parts(setting), *_outer_parts(plan, setting)]
    step_s = plan.prediction.step_s
    rest_s = step_s - sum(part.seconds for part in parts)
    if abs(rest_s) > 1e-9 * step_s:
        parts.append(Part("not explained", "remainder", rest_s, _EDITED))
    return Waterfall(tuple(part for part in parts if abs(part.seconds) > _NEGLIGIBLE * step_s), step_s)


def _work_parts(plan: Plan, setting: Setting) -> Iterator[Part]:
    ranks = _work_of_ranks(plan, setting)
    count = len(ranks)
    exchanges = _exchanges(plan)
    forward_s = sum(r.forward_s for r in ranks) / count - exchanges[0] / count
    backward_s = sum(r.backward_s for r in ranks) / count - exchanges[1] / count
    yield Part("forward", "compute", forward_s, "Mean of the ranks.")
    yield Part("backward", "compute", backward_s, "Mean of the ranks.")
    yield Part(
        "tensor-parallel exchange",
        "communication",
        sum(exchanges) / count,
        "Collectives of the ranks that share every layer; mean of the pipeline ranks.",
    )
    yield Part(
        "recomputation",
        "recomputation",
        sum(r.recompute_s for r in ranks) / count,
        "Forwards that the backward repeats to save memory; mean of the ranks.",
    )
    yield Part(
        "runtime per action",
        "overhead",
        sum(r.overhead_s for r in ranks) / count,
        "What the runtime itself takes for each action; mean of the ranks.",
    )
    yield Part(
        "runtime per unit and operation",
        "overhead",
        sum(r.script_s for r in ranks) / count,
        "What it takes to run all of the step function on each rank, beside computing; mean of the ranks.",
    )
    mean_s = sum(r.total_s for r in ranks) / count
    busiest = max(range(count), key=lambda rank: ranks[rank].total_s)
    yield Part(
        "imbalance",
        "imbalance",
        ranks[busiest].total_s - mean_s,
        f"Work of the busiest rank, {busiest}, above the mean.",
    )
    free = replace(setting, link=None, host=None, cores=0)
    bubble_s = play(free).simulation.step_s - ranks[busiest].total_s
    yield Part(
        "bubble",
        "bubble",
        max(0.0, bubble_s),
        "Filling and draining: the busiest rank waits for others' work.",
    )


def _exchanges(plan: Plan) -> tuple[float, float]:
    """Seconds of the exchange in all forwards of all stages, and in all backwards."""
    assert plan.prediction is not None
    stages, count = plan.prediction.stages, plan.schedule.microbatches
    return (
        count * sum(stage.forward_exchange_s for stage in stages),
        count * sum(stage.backward_exchange_s for stage in stages),
    )


def _work_of_ranks(plan: Plan, setting: Setting) -> list[_Work]:
    assert plan.prediction is not None
    again = [stage.recompute_s for stage in plan.prediction.stages]
    found = []
    for row in setting.schedule.actions:
        forward_s = backward_s = recompute_s = 0.0
        for action in row:
            if not action.is_compute:
                continue
            seconds = setting.costs[action.stage].seconds(action.kind)
            if action.kind is Kind.FORWARD:
                forward_s += seconds
                continue
            repeated_s = 0.0 if action.kind is Kind.BACKWARD_WEIGHT else min(seconds, again[action.stage])
            recompute_s += repeated_s
            backward_s += seconds - repeated_s
        overhead_s = sum(action.is_compute for action in row) * setting.conditions.action_overhead_s
        forwards = sum(action.kind is Kind.FORWARD for action in row)
        found.append(
            _Work(
                forward_s,
                backward_s,
                recompute_s=recompute_s,
                overhead_s=overhead_s,
                script_s=forwards * setting.conditions.forward_overhead_s,
            )
        )
    return found


def _waiting_parts(setting: Setting) -> Iterator[Part]:
    assert setting.link is not None
    steps: tuple[tuple[str, _PartKind, Callable[[Link], Link], int, str], ...] = (
        (
            "messages: latency",
            "communication",
            lambda link: replace(link, bandwidth_Bps=float("inf"), occupancy=0.0),
            0,
            "Latency between stages that no compute hides.",
        ),
        (
            "messages: bytes",
            "communication",
            lambda link: replace(link, occupancy=0.0),
            0,
            "Bytes between stages that no compute hides.",
        ),
        (
            "messages: copying",
            "communication",
            lambda link: link,
            0,
            "Cores that copy messages instead of computing.",
        ),
        (
            "shared cores",
            "overhead",
            lambda link: link,
            setting.cores,
            "Ranks of one host that compute at once on fewer cores.",
        ),
    )
    alone = replace(setting, link=None, host=None, cores=0)
    before_s = play(alone).simulation.step_s
    if setting.host is not None:
        alone = replace(alone, host=setting.host)
        after_s = play(alone).simulation.step_s
        yield Part(
            "copies to the host",
            "communication",
            after_s - before_s,
            "What units offload, and get back, beyond what compute hides.",
        )
        before_s = after_s
    for name, kind, form, cores, meaning in steps:
        after_s = play(replace(alone, link=_formed(setting.link, form), cores=cores)).simulation.step_s
        yield Part(name, kind, after_s - before_s, meaning)
        before_s = after_s
    yield Part(
        "crowded hosts",
        "overhead",
        before_s * (setting.conditions.crowding - 1.0),
        "Replicas of one host that compute on fewer cores than they have ranks.",
    )


def _formed(link: Callable[[int, int], Link], form: Callable[[Link], Link]) -> Callable[[int, int], Link]:
    return lambda a, b: form(link(a, b))


def _outer_parts(plan: Plan, setting: Setting) -> Iterator[Part]:
    assert plan.prediction is not None
    conditions = plan.prediction.conditions
    yield Part(
        "sums of tied gradients", "communication", conditions.tie_s, "Parameters that several stages hold."
    )
    yield Part(
        "sums over tensor-parallel ranks",
        "communication",
        conditions.settling_s,
        "Gradients of parameters that each of them has whole, once a step.",
    )
    yield Part(
        "sums over replicas",
        "communication",
        setting.sync_s - conditions.tie_s - conditions.settling_s,
        "Gradients of data parallel replicas, with what sharing of parameters takes.",
    )
    yield Part(
        "before and after the schedule",
        "overhead",
        conditions.step_overhead_s,
        "What the runtime does around the first and the last action.",
    )


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one pipeline rank during a step.

    Attributes:
        moments: (seconds, bytes of activations from then on), in order of time; the first is at 0.
    """

    rank: int
    lasting_bytes: int
    moments: tuple[tuple[float, int], ...]


def memory_over_time(
    simulation: Simulation, costs: Sequence[StageCost], memory: Sequence[MemoryPrediction]
) -> tuple[RankMemory, ...]:
    """The memory of every rank.

    A forward keeps `saved_bytes` from its start to the end of its backward; of a backward in two parts, ``I``
    leaves `weight_bytes` until ``W`` ends. What is at the host is not there.
    """
    changes: list[list[tuple[float, int]]] = [[] for _ in memory]
    copied = {(copy.action.stage, copy.action.microbatch) for copy in simulation.copied}
    for event in (*simulation.events, *simulation.copied):
        stage, kind = event.action.stage, event.action.kind
        both = costs[stage].changes(kind, copied=(stage, event.action.microbatch) in copied)
        changes[event.rank] += zip((event.start_s, event.end_s), both, strict=True)
    moments = [_held(each) for each in changes]
    return tuple(
        RankMemory(
            rank,
            part.parameters_bytes + part.gradients_bytes + part.optimizer_bytes + part.batch_bytes,
            tuple(row),
        )
        for rank, (part, row) in enumerate(zip(memory, moments, strict=True))
    )


def _held(changes: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """What is held from each moment of a change on; at one moment, what goes makes room first."""
    row = [(0.0, 0)]
    for at_s, change in sorted(changes):
        if change:
            row.append((at_s, row[-1][1] + change))
    return row
