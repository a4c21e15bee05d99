"""The second sieve of a search: plans in the order of their closed forms, until no other can be better.

::

    closed form   0.21   0.22   0.26  │  0.43   0.52      seconds
    plan          0.23   0.21   0.27  │  not made         chain DP and simulated schedule

Making a plan takes up to a minute, its closed form microseconds. They agree within 30 % in nearly all cases.

Chooses whether tensor-parallel ranks cut the tensors between layers along the sequence, too.

Divided norms and residuals are worth their collectives, twice as many, where latencies are small; and ranks
keep their part of what is between layers alone, which may be what fits in memory.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from shardwright.config import Config
from shardwright.errors import ConfigError, InfeasiblePlanError, PlanError
from shardwright.mesh import Mesh
from shardwright.plan import Plan
from shardwright.quantities import format_seconds

_TRUST = 1.5
"""A plan takes no less than its closed form, divided by this."""

Candidate = TypeVar("Candidate")


@dataclass(frozen=True, slots=True)
class Planned(Generic[Candidate]):
    """A plan of a candidate.

    Attributes:
        plan: what chain DP and simulation made of it.
        expected_s: the same of the candidate, by closed forms.
    """

    candidate: Candidate
    plan: Plan
    seconds: float
    expected_s: float


@dataclass(frozen=True, slots=True)
class _Survivors(Generic[Candidate]):
    """The candidates that closed forms left.

    Attributes:
        planned: their plans, in the order of their closed forms.
        failures: why others have none, in the order of the candidates.
        num_left_out: candidates of which no plan was made, because others are better.
    """

    planned: list[Planned[Candidate]]
    failures: list[PlanError]
    num_left_out: int


def plan_survivors(
    candidates: Sequence[Candidate],
    expected: Sequence[float],
    make: Callable[[Candidate], Iterable[Plan]],
    *,
    seconds: Callable[[Candidate, Plan], float],
) -> _Survivors[Candidate]:
    """Plans the candidates that may be the best; all of them where none can be planned."""
    planned: list[Planned[Candidate]] = []
    failures: dict[int, PlanError] = {}
    order = sorted(range(len(candidates)), key=lambda number: (expected[number], number))
    for place, number in enumerate(order):
        candidate = candidates[number]
        if planned:
            best = min(planned, key=lambda each: each.seconds)
            # Where closed forms say too much of all, or too little, that of the best says it, too.
            if expected[number] > _TRUST * max(best.seconds, best.expected_s):
                return _Survivors(planned, _in_order(failures), len(order) - place)
        try:
            for plan in make(candidate):
                planned.append(Planned(candidate, plan, seconds(candidate, plan), expected[number]))
        except PlanError as error:
            failures[number] = error
    return _Survivors(planned, _in_order(failures), 0)


def _in_order(failures: dict[int, PlanError]) -> list[PlanError]:
    return [failures[number] for number in sorted(failures)]


_NEAR_TIE = 1.01
_NUM_RIVALS = 5


def meshes(world_size: int, config: Config, *, most_tensor: int = 1) -> list[Mesh]:
    """All grids that the settings leave open: pipeline ranks, replicas, and ranks that share parameters.

    >>> [(mesh.pipeline, mesh.data, mesh.shard) for mesh in meshes(4, Config())]
    [(1, 4, 1), (1, 4, 2), (1, 4, 4), (2, 2, 1), (2, 2, 2), (4, 1, 1)]
    >>> [(mesh.pipeline, mesh.data, mesh.tensor) for mesh in meshes(2, Config(), most_tensor=8)]
    [(1, 2, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2)]
    """
    pipeline, data = config.pipeline_parallel_degree, config.data_parallel_degree
    shard, tensor = config.sharded_data_parallel_degree, config.tensor_parallel_degree
    context, expert = config.context_parallel_degree, config.expert_parallel_degree
    proposed = most_tensor if tensor == context == expert == 1 else tensor
    left = world_size // (context * expert) if world_size % (context * expert) == 0 else 0
    degrees = [t for t in _divisors(left) if t == tensor or (tensor == 1 and t <= proposed)]
    found = [
        Mesh.of(
            world_size=world_size,
            pipeline=p,
            data=d,
            tensor=t,
            context=context,
            expert=expert,
            shard=s,
            placement=config.placement_strategy,
        )
        for t in degrees
        for p, d in ((p, left // t // p) for p in _divisors(left // t))
        if p == (pipeline or p) and d == (data or d)
        for s in _divisors(d)
        if s == shard or shard == 1
        if s == 1 or t == tensor  # the runtime does not shard what ranks share already
    ]
    found = [mesh for mesh in found if _divides_updates(mesh, config)]
    if not found:
        config.resolve_world(world_size)  # says what does not multiply
        raise ConfigError(f"no degrees fit {world_size} ranks and sharded_data_parallel_degree {shard}.")
    return found


def _divides_updates(mesh: Mesh, config: Config) -> bool:
    """Whether so many replicas as the settings say can share the optimizer's state."""
    wanted = config.shard_optimizer_state
    return isinstance(wanted, bool) or (mesh.data % wanted == 0 and wanted % mesh.shard == 0)


def best_of_meshes(
    candidates: Sequence[Mesh], make: Callable[[Mesh], Plan], *, expected: Sequence[float] | None = None
) -> Plan:
    """The plan with most samples a second over all grids, of near ties the simplest."""
    survivors = plan_survivors(
        candidates,
        [0.0] * len(candidates) if expected is None else expected,
        lambda mesh: (make(mesh),),
        seconds=_seconds_of_replica,
    )
    found = survivors.planned
    if not found:
        failures = survivors.failures
        too_large = [error for error in failures if isinstance(error, InfeasiblePlanError)]
        raise (too_large or failures)[-1]
    least = min(each.seconds for each in found)
    near = [each for each in found if each.seconds <= least * _NEAR_TIE]
    best = min(near, key=lambda each: (_simplicity(each), each.seconds))
    rivals = sorted((each for each in found if each is not best), key=lambda each: each.seconds)
    why = (*best.plan.why, _choice(best, rivals, survivors))
    return best.plan.model_copy(update={"why": why})


def _seconds_of_replica(mesh: Mesh, plan: Plan) -> float:
    """Seconds of a step, for one of its replicas: each has a batch of its own."""
    assert plan.prediction is not None
    return plan.prediction.step_s / mesh.data


def _simplicity(each: Planned[Mesh]) -> tuple[int, int, int]:
    return each.candidate.tensor, each.candidate.pipeline, each.candidate.shard


def _choice(best: Planned[Mesh], rivals: Sequence[Planned[Mesh]], survivors: _Survivors[Mesh]) -> str:
    text = f"Degrees: {_title(best)}, the most samples a second of {len(rivals) + 1} grids of ranks"
    apart = []
    if survivors.failures:
        apart.append(f"{len(survivors.failures)} cannot be planned, or do not fit")
    if survivors.num_left_out:
        apart.append(f"closed forms rule out {survivors.num_left_out} as too slow or too large")
    if apart:
        text += f" ({'; '.join(apart)})"
    others = [f"{_title(each)} {each.seconds / best.seconds - 1:+.1%}" for each in rivals[:_NUM_RIVALS]]
    return f"{text}; time a sample of the next: {', '.join(others)}." if others else f"{text}."


def _title(each: Planned[Mesh]) -> str:
    assert each.plan.prediction is not None
    mesh = each.candidate
    shared = mesh.shared_title
    shared += f", ZeRO-3 over {mesh.shard}" if mesh.shard > 1 else ""
    step = format_seconds(each.plan.prediction.step_s)
    return f"pipeline {mesh.pipeline} x data {mesh.data}{shared} ({step} a step)"


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


_SAID_OF_WHOLE_ONES = "Sequences are cut between layers", "Sequences stay whole between layers"
_SAID_OF_PARTS = (  # context ranks have cut the sequences in any case, or expert ranks the samples
    "Parts of a batch are cut again between layers, along the sequence over tensor ranks",
    "Parts of a batch stay as they are between layers, whole on each tensor rank",
)


def with_or_without_sequences(
    config: Config,
    plan_with: Callable[[Config], Plan],
    *,
    tensor: int | None = None,
    previous: Plan | None = None,
) -> Plan:
    """The plan with the shorter predicted step, if the settings leave the choice."""
    tensor = config.tensor_parallel_degree if tensor is None else tensor
    if config.sequence_parallel != "auto" or tensor == 1:
        return plan_with(config)
    is_grid = max(config.context_parallel_degree, config.expert_parallel_degree) > 1
    if previous is not None and previous.tensor is not None:
        dim = previous.tensor.cut_again if is_grid else previous.tensor.between_units
        kept = dim is not None
        with contextlib.suppress(PlanError):  # another machine, or less memory
            return plan_with(config.model_copy(update={"sequence_parallel": kept}))
    too_large: InfeasiblePlanError | None = None
    whole: Plan | None = None
    try:
        whole = plan_with(config.model_copy(update={"sequence_parallel": False}))
    except InfeasiblePlanError as error:
        too_large = error
    try:
        cut = plan_with(config.model_copy(update={"sequence_parallel": True}))
    except PlanError:  # no tensor between layers has a sequence, or even its parts do not fit
        if whole is None:
            assert too_large is not None
            raise too_large from None
        return whole
    is_cut, stay_whole = _SAID_OF_PARTS if is_grid else _SAID_OF_WHOLE_ONES
    if whole is None:
        return _said(cut, f"{is_cut}: without that, tensors between layers do not fit.")
    cut_s, whole_s = (each.prediction.step_s if each.prediction else 0.0 for each in (cut, whole))
    seconds = f"{format_seconds(cut_s)} a step if they are cut, {format_seconds(whole_s)} if not."
    return _said(cut, f"{is_cut}: {seconds}") if cut_s < whole_s else _said(whole, f"{stay_whole}: {seconds}")


def _said(plan: Plan, line: str) -> Plan:
    return plan.model_copy(update={"why": (*plan.why, line)})
