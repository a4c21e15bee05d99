"""The programs of one batch, whose microbatches may take different paths, and the order of its work."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from shardwright.errors import TraceMismatchError
from shardwright.plan import SchedulePlan
from shardwright.runtime.homes import Crossings
from shardwright.schedule import Edge, Schedule, StageCost, build_schedule, lower


class RankProgram(Protocol):
    """The part of one pipeline rank in a microbatch.

    Attributes:
        crossings: what forwards send from stage to stage, on all ranks.
        gradients: what backwards send: (sending stage, receiving stage) -> values.
        state: buffers that the step function changes -> pipeline rank of their home.
        offloads: stages of which units are offloaded, on all ranks.
    """

    @property
    def stage_ranks(self) -> tuple[int, ...]: ...
    @property
    def crossings(self) -> Crossings: ...
    @property
    def gradients(self) -> Crossings: ...
    @property
    def state(self) -> Mapping[str, int]: ...
    @property
    def offloads(self) -> frozenset[int]: ...


def check_one_order(programs: Sequence[RankProgram]) -> None:
    """Refuses a batch for which no one schedule exists."""
    orders = sorted({program.stage_ranks for program in programs})
    if len(orders) > 1:
        first, second = (" -> ".join(map(str, order)) for order in orders[:2])
        raise TraceMismatchError(
            f"the microbatches of one batch go through the ranks in different orders, {first} and {second}, "
            "because the model chooses the order of its layers by values of the batch. Let them choose "
            "which layers run and not in which order, or put the choice inside one module."
        )


def homes_of_buffers(programs: Sequence[RankProgram]) -> dict[str, int]:
    """The pipeline rank on which a batch changes each buffer: one for all microbatches."""
    found: dict[str, int] = {}
    for program in programs:
        for name, rank in program.state.items():
            if found.setdefault(name, rank) != rank:
                raise TraceMismatchError(
                    f"microbatches of one batch change the buffer {name} on different ranks, {found[name]} "
                    f"and {rank}, because the model chooses by values of the batch where it does that, and "
                    "no rank would see all changes. Change it in one place, or inside one module."
                )
    return found


def merged_edges(programs: Sequence[RankProgram]) -> list[Edge]:
    """Transfers between stages for lowering and simulation: those of any of the microbatches.

    Bytes are those of the largest microbatch.
    """
    pairs = {pair for program in programs for pair in program.crossings}
    pairs |= {(source, target) for program in programs for target, source in program.gradients}
    edges = []
    for source, target in sorted(pairs):
        groups = [program.crossings.get((source, target), ()) for program in programs]
        back = [program.gradients.get((target, source), ()) for program in programs]
        edges.append(
            Edge(
                source=source,
                target=target,
                num_bytes=max(sum(c.spec.num_bytes for c in group) for group in groups),
                gradient_bytes=max(sum(c.spec.num_bytes for c in group) for group in back),
                has_gradient=any(back),
            )
        )
    return edges


_Pairs = frozenset[tuple[int, int]]
_Key = tuple[tuple[int, ...], int, bool, _Pairs, _Pairs, frozenset[int]]


class BatchSchedules:
    """Makes a schedule when a batch first needs it, and keeps it."""

    def __init__(self, chosen: SchedulePlan, costs: Sequence[StageCost] | None):
        self._chosen = chosen
        self._costs = costs
        self._made: dict[_Key, Schedule] = {}

    def of_batch(self, programs: Sequence[RankProgram], *, trains: bool) -> Schedule:
        stage_ranks = programs[0].stage_ranks
        sent = frozenset(pair for program in programs for pair in program.crossings)
        sent_back = frozenset(pair for program in programs for pair in program.gradients)
        offloads = frozenset[int]().union(*(program.offloads for program in programs))
        key = stage_ranks, len(programs), trains, sent, sent_back, offloads
        if key not in self._made:
            schedule = build_schedule(
                self._chosen.kind,
                stage_ranks=stage_ranks,
                num_microbatches=len(programs),
                active_microbatches=self._chosen.active_microbatches if trains else None,
                forward_only=not trains,
                costs=self._costs if self._costs and len(self._costs) == len(stage_ranks) else None,
            )
            self._made[key] = lower(schedule.with_host_copies(offloads), merged_edges(programs))
        return self._made[key]
