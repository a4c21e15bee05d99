"""Whole plans with predictions and conditions, made without a model: for replays, waterfalls and reports."""

from typing import Any

from hypothesis import strategies as st

from shardwright.cluster import Link
from shardwright.plan import (
    Alternative,
    MemoryPrediction,
    MeshPlan,
    ModelIdentity,
    Plan,
    Prediction,
    SchedulePlan,
    StagePlan,
    StagePrediction,
)
from shardwright.plan.prediction import Conditions, FlowConditions
from shardwright.planner.replay import base_setting, play
from shardwright.schedule import place_stages

LIMIT_BYTES = 10_000


def usual_conditions(ranks: int) -> Conditions:
    """Ranks of one host."""
    link = Link(latency_s=1e-4, bandwidth_Bps=1e9)
    return Conditions(hosts=(0,) * ranks, intra_node=link, inter_node=link)


def planned(
    *,
    kind: str = "1f1b",
    ranks: int = 2,
    microbatches: int = 4,
    data: int = 1,
    forward_s: float = 0.1,
    recompute_s: float = 0.0,
    slow_stage: float = 1.0,
    message_bytes: int = 1000,
    sync_s: float = 0.05,
    update_s: float = 0.0,
    unit: str = "h.{stage}",
    **changed: Any,
) -> Plan:
    """A plan whose predicted step is that of its replay; the last stage is `slow_stage` times as slow."""
    stage_ranks = place_stages(kind, num_ranks=ranks)
    last = len(stage_ranks) - 1
    stages = tuple(
        StagePrediction(
            forward_s=forward_s * (slow_stage if stage == last else 1.0),
            backward_s=2 * forward_s * (slow_stage if stage == last else 1.0) + recompute_s,
            recompute_s=recompute_s,
            weight_s=forward_s / 2,
            send_bytes=message_bytes if stage < last else 0,
            saved_bytes=100,
            parameter_bytes=400,
        )
        for stage in range(last + 1)
    )
    stated = Conditions(
        flows=tuple(
            FlowConditions(source=s, target=s + 1, num_bytes=message_bytes, gradient_bytes=message_bytes)
            for s in range(last)
        ),
        hosts=tuple(rank // 2 for rank in range(ranks)),
        intra_node=Link(latency_s=1e-3, bandwidth_Bps=1e6),
        inter_node=Link(latency_s=1e-2, bandwidth_Bps=1e5),
        ranks_per_node=min(2, ranks),
        action_overhead_s=1e-4,
        step_overhead_s=4e-3,
        sync_latency_s=sync_s / 5,
        memory_limit_bytes=LIMIT_BYTES,
    ).model_copy(update=changed)
    names = [unit.format(stage=stage) for stage in range(last + 1)]
    draft = Plan(
        model=ModelIdentity(fingerprint="f00d", num_parameters=1234, units=tuple(names)),
        mesh=MeshPlan(pipeline=ranks, data=data),
        schedule=SchedulePlan(kind=kind, microbatches=microbatches),
        stages=tuple(
            StagePlan(rank=rank, units=(name,), recompute=(name,) if recompute_s else ())
            for rank, name in zip(stage_ranks, names, strict=True)
        ),
        prediction=Prediction(
            step_s=1.0,
            sync_s=sync_s,
            update_s=update_s,
            bubble=0.0,
            stages=stages,
            memory=(),
            provenance="measured",
            conditions=stated,
        ),
        why=(f"Chosen: {kind}, {microbatches} microbatches.", "The times of the units were measured."),
        alternatives=(
            Alternative(
                schedule="gpipe",
                microbatches=microbatches,
                stages=ranks,
                step_s=3.25,
                peak_bytes=4096,
                verdict="12.5% slower, with 4.0 KiB",
            ),
        ),
    )
    return _predicted(draft)


def _predicted(draft: Plan) -> Plan:
    """The same plan with the step, bubble and memory of its replay."""
    assert draft.prediction is not None
    replay = play(base_setting(draft))
    memory = tuple(
        MemoryPrediction(
            parameters_bytes=800,
            gradients_bytes=800,
            optimizer_bytes=1600,
            activations_bytes=peak,
            work_bytes=50,
        )
        for peak in replay.simulation.peak_bytes
    )
    bubble = min(1.0, max(0.0, replay.simulation.bubble))
    prediction = draft.prediction.model_copy(
        update={"step_s": replay.step_s, "bubble": bubble, "memory": memory}
    )
    return draft.model_copy(update={"prediction": prediction})


seconds = st.floats(0.0, 1.0, allow_nan=False)

plans = st.builds(
    planned,
    kind=st.sampled_from(("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v")),
    ranks=st.integers(1, 5),
    microbatches=st.integers(1, 8),
    forward_s=st.floats(1e-4, 1.0),
    recompute_s=seconds,
    slow_stage=st.floats(1.0, 3.0),
    message_bytes=st.integers(0, 100_000),
    sync_s=seconds,
    cores=st.integers(0, 3),
    crowding=st.floats(1.0, 2.0),
    intra_node=st.builds(
        Link,
        latency_s=st.floats(0.0, 0.1),
        bandwidth_Bps=st.floats(1e3, 1e9),
        occupancy=st.floats(0.0, 1.0),
    ),
    tie_s=st.just(0.0),
)
