"""What planning from a first batch takes of the run: profiles, placement by hand, one plan for all ranks."""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

from shardwright.errors import UsageError
from shardwright.plan import Plan
from shardwright.planner import estimate_profile
from shardwright.profile import Profile
from shardwright.run.context import Context, context
from shardwright.run.profiler import Profiler, ToProfile, Traced


def profiles_of(
    run: Context,
    traces: Mapping[int, Traced],
    *,
    profiler: Callable[[], Profiler] | None,
    budget_s: float,
    again: bool = False,
) -> dict[int, Profile]:
    """The costs for each number of microbatches; collective over all ranks, where they are measured."""
    assert run.cluster is not None
    assert run.reporter is not None
    device = run.cluster.device
    estimated = {m: estimate_profile(trace.graph, device=device) for m, trace in traces.items()}
    if profiler is None or run.config.profile == "estimated":
        return estimated
    with run.reporter.phase("measuring units") as phase:
        sizes = [ToProfile(m, trace, estimated[m]) for m, trace in traces.items()]
        measured = profiler().measure(sizes, budget_s=budget_s, phase=phase, again=again)
    return {
        m: Profile(costs={**profile.costs, **measured}, device=device.name)
        for m, profile in estimated.items()
    }


# ---- placement by hand ----


def check_partition(rank: int) -> None:
    """Refuses a pipeline rank that there is not."""
    pipeline = context().mesh.pipeline
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < pipeline:
        raise UsageError(
            f"partition {rank!r} does not exist: with {pipeline} pipeline ranks they are 0 to {pipeline - 1}."
        )


def point_out_auto_partition(*, of: str, stacklevel: int) -> None:
    """Warns of a placement by hand that the planner does not heed."""
    if context().config.auto_partition:
        warnings.warn(
            f"placement by hand changes nothing: auto_partition is true, so the planner places the {of}. "
            "Set auto_partition to False and default_partition to the rank of all others, for example 0.",
            stacklevel=stacklevel,
        )


def placed_by_hand(
    units: Iterable[str], rank_at: Callable[[str], int | None], *, separator: str
) -> dict[str, int]:
    """The pipeline rank of each unit that the user has placed, by name; the innermost placement wins."""
    placed = {}
    for name in units:
        parts = name.split(separator)
        paths = (separator.join(parts[:depth]) for depth in range(len(parts), -1, -1))
        rank = next((rank for path in paths if (rank := rank_at(path)) is not None), None)
        if rank is not None:
            placed[name] = rank
    return placed


# ---- one plan for all ranks ----


def plan_of_first_rank(context: Context, plan: Callable[[], Plan], *, on_all: bool) -> Plan:
    """The first rank's plan; collective over all ranks."""
    if on_all and context.rank > 0:
        with suppress(Exception), _unsaid():  # that of the first rank counts, its error and what it says
            plan()
    return context.from_first_rank(plan)


@contextmanager
def _unsaid() -> Iterator[None]:
    """Inside, the library warns of nothing: the first rank says the same."""
    logger = logging.getLogger("shardwright")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
