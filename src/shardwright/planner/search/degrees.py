"""Chooses the grid of ranks: the one with most samples a second of those that closed forms leave."""

from collections.abc import Callable, Iterable, Sequence

from shardwright.config import Config
from shardwright.errors import ConfigError, InfeasiblePlanError
from shardwright.mesh import Mesh
from shardwright.plan import Plan
from shardwright.planner.search.funnel import Planned, Survivors, plan_survivors
from shardwright.quantities import format_seconds

__all__ = ["best_of_meshes", "best_plans", "meshes"]

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
        if p == (pipeline or p) and d == (data or d) and not (config.ddp is False and d > 1)
        for s in _divisors(d)
        if s == shard or shard == 1
        if s == 1 or t == tensor  # the runtime does not shard what ranks share already
    ]
    if not found:
        config.resolve_world(world_size)  # says what does not multiply
        raise ConfigError(f"no degrees fit {world_size} ranks and sharded_data_parallel_degree {shard}.")
    return found


def best_of_meshes(
    candidates: Sequence[Mesh], make: Callable[[Mesh], Plan], *, expected: Sequence[float] | None = None
) -> Plan:
    """The plan with most samples a second over all grids, of near ties the simplest.

    Each replica has a batch of its own, as a training script loads it.
    """
    survivors = _survivors(candidates, lambda mesh: (make(mesh),), expected, most=1)
    found = survivors.planned
    least = min(each.seconds for each in found)
    near = [each for each in found if each.seconds <= least * _NEAR_TIE]
    best = min(near, key=lambda each: (_simplicity(each), each.seconds))
    rivals = sorted((each for each in found if each is not best), key=lambda each: each.seconds)
    why = (*best.plan.why, _choice(best, rivals, survivors))
    return best.plan.model_copy(update={"why": why})


def best_plans(
    candidates: Sequence[Mesh],
    make: Callable[[Mesh], Iterable[Plan]],
    *,
    most: int,
    expected: Sequence[float] | None = None,
) -> list[Plan]:
    """The plans with most samples a second over all grids, the best first."""
    found = _survivors(candidates, make, expected, most=most).planned
    ranked = sorted(found, key=lambda each: (each.seconds, _simplicity(each)))
    return [each.plan for each in ranked[:most]]


def _survivors(
    candidates: Sequence[Mesh],
    make: Callable[[Mesh], Iterable[Plan]],
    expected: Sequence[float] | None,
    *,
    most: int,
) -> Survivors[Mesh]:
    """The plans of the grids that may be among the best."""
    survivors = plan_survivors(
        candidates,
        [0.0] * len(candidates) if expected is None else expected,
        make,
        seconds=_seconds_of_replica,
        most=most,
    )
    if not survivors.planned:
        failures = survivors.failures
        too_large = [error for error in failures if isinstance(error, InfeasiblePlanError)]
        raise (too_large or failures)[-1]
    return survivors


def _seconds_of_replica(mesh: Mesh, plan: Plan) -> float:
    """Seconds of a step, for one of its replicas: each has a batch of its own."""
    assert plan.prediction is not None
    return plan.prediction.step_s / mesh.data


def _simplicity(each: Planned[Mesh]) -> tuple[int, int, int]:
    return each.candidate.tensor, each.candidate.pipeline, each.candidate.shard


def _choice(best: Planned[Mesh], rivals: Sequence[Planned[Mesh]], survivors: Survivors[Mesh]) -> str:
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
