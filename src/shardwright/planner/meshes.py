"""Chooses the grid of ranks: plans each, and keeps the one with most samples per second."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shardwright.config import Config
from shardwright.errors import ConfigError, InfeasiblePlanError, PlanError
from shardwright.mesh import Mesh
from shardwright.plan import Plan
from shardwright.units import format_seconds

__all__ = ["best_of_meshes", "best_plans", "meshes"]

_NEAR_TIE = 1.01
_NUM_RIVALS = 5


@dataclass(frozen=True, slots=True)
class _Planned:
    mesh: Mesh
    plan: Plan

    @property
    def replica_s(self) -> float:
        """Seconds of a step, for one of its replicas: each has a batch of its own.

        Not as earlier runs correct them: of some grids there were enough, of others not.
        """
        prediction = self.plan.prediction
        assert prediction is not None
        return prediction.step_s / prediction.correction / self.mesh.data

    @property
    def simplicity(self) -> tuple[int, int]:
        return self.mesh.pipeline, self.mesh.shard


def meshes(world_size: int, config: Config) -> list[Mesh]:
    """All grids that the settings leave open: pipeline ranks, replicas, and replicas that share parameters.

    Raises:
        ConfigError: none multiplies to the number of ranks.

    >>> [(mesh.pipeline, mesh.data, mesh.shard) for mesh in meshes(4, Config())]
    [(1, 4, 1), (1, 4, 2), (1, 4, 4), (2, 2, 1), (2, 2, 2), (4, 1, 1)]
    """
    pipeline, data = config.pipeline_parallel_degree, config.data_parallel_degree
    shard = config.sharded_data_parallel_degree
    found = [
        Mesh.of(world_size=world_size, pipeline=p, data=d, shard=s, placement=config.placement_strategy)
        for p, d in ((p, world_size // p) for p in _divisors(world_size))
        if p == (pipeline or p) and d == (data or d) and not (config.ddp is False and d > 1)
        for s in _divisors(d)
        if s == shard or shard == 1
    ]
    if not found:
        config.resolve_world(world_size)  # says what does not multiply
        raise ConfigError(f"no degrees fit {world_size} ranks and sharded_data_parallel_degree {shard}.")
    return found


def best_of_meshes(candidates: Sequence[Mesh], make: Callable[[Mesh], Plan]) -> Plan:
    """Plans every grid; returns the plan with most samples a second, of near ties the simplest.

    Each replica has a batch of its own, as a training script loads it.

    Args:
        candidates: grids.
        make: makes the plan of one.

    Raises:
        InfeasiblePlanError: none fits in memory; the message is that of the one that is closest to it.
        PlanError: no grid can be planned; the message of the last.
    """
    found, failures = _planned(candidates, lambda mesh: (make(mesh),))
    least = min(each.replica_s for each in found)
    near = [each for each in found if each.replica_s <= least * _NEAR_TIE]
    best = min(near, key=lambda each: (each.simplicity, each.replica_s))
    rivals = sorted((each for each in found if each is not best), key=lambda each: each.replica_s)
    why = (*best.plan.why, _choice(best, rivals, num_failed=len(failures)))
    return best.plan.model_copy(update={"why": why})


def best_plans(
    candidates: Sequence[Mesh], make: Callable[[Mesh], Iterable[Plan]], *, most: int
) -> list[Plan]:
    """The plans with most samples a second over all grids, the best first.

    Args:
        candidates: grids.
        make: makes the plans of one.
        most: how many are wanted.

    Raises:
        as `best_of_meshes`.
    """
    found, _ = _planned(candidates, make)
    ranked = sorted(found, key=lambda each: (each.replica_s, each.simplicity))
    return [each.plan for each in ranked[:most]]


def _planned(
    candidates: Sequence[Mesh], make: Callable[[Mesh], Iterable[Plan]]
) -> tuple[list[_Planned], list[PlanError]]:
    """The plans of all grids, and why others have none.

    Raises:
        PlanError: no grid has one.
    """
    found: list[_Planned] = []
    failures: list[PlanError] = []
    for mesh in candidates:
        try:
            found += [_Planned(mesh, plan) for plan in make(mesh)]
        except PlanError as error:
            failures.append(error)
    if not found:
        too_large = [error for error in failures if isinstance(error, InfeasiblePlanError)]
        raise (too_large or failures)[-1]
    return found, failures


def _choice(best: _Planned, rivals: Sequence[_Planned], *, num_failed: int) -> str:
    text = f"Degrees: {_title(best)}, the most samples a second of {len(rivals) + 1} grids of ranks"
    if num_failed:
        text += f" ({num_failed} more cannot be planned, or do not fit)"
    others = [f"{_title(each)} {each.replica_s / best.replica_s - 1:+.1%}" for each in rivals[:_NUM_RIVALS]]
    return f"{text}; time a sample of the next: {', '.join(others)}." if others else f"{text}."


def _title(each: _Planned) -> str:
    assert each.plan.prediction is not None
    mesh = each.mesh
    shared = f", ZeRO-3 over {mesh.shard}" if mesh.shard > 1 else ""
    step = format_seconds(each.plan.prediction.step_s)
    return f"pipeline {mesh.pipeline} x data {mesh.data}{shared} ({step} a step)"


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
