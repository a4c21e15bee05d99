"""The order of work for each kind of batch: a plan's schedules, with their transfers."""

from collections.abc import Sequence

from shardwright.plan import SchedulePlan
from shardwright.runtime.batch_programs import merged_edges
from shardwright.runtime.rank_program import RankProgram
from shardwright.schedule import Schedule, StageCost, build_schedule, lower

__all__ = ["BatchSchedules"]

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
