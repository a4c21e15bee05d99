"""A plan and its timelines, for the tests of this folder."""

from planned import usual_conditions

from shardwright.observe import MeasuredEvent
from shardwright.plan import (
    MemoryPrediction,
    MeshPlan,
    ModelIdentity,
    Plan,
    Prediction,
    SchedulePlan,
    StagePlan,
    StagePrediction,
)
from shardwright.schedule import Simulation, build_schedule, simulate, unit_costs


def two_stage_plan() -> Plan:
    stage = StagePrediction(forward_s=0.1, backward_s=0.2, saved_bytes=100, parameter_bytes=2048)
    memory = MemoryPrediction(
        parameters_bytes=800, gradients_bytes=800, optimizer_bytes=1600, activations_bytes=100
    )
    return Plan(
        model=ModelIdentity(fingerprint="f", num_parameters=10, units=("embed", "head")),
        mesh=MeshPlan(pipeline=2, data=2),
        schedule=SchedulePlan(kind="1f1b", microbatches=3),
        stages=(StagePlan(rank=0, units=("embed",)), StagePlan(rank=1, units=("head",))),
        prediction=Prediction(
            step_s=1.2,
            bubble=0.25,
            stages=(stage, stage),
            memory=(memory, memory),
            provenance="measured",
            conditions=usual_conditions(2),
        ),
        why=("1f1b keeps fewer microbatches.", "The times of the units were measured."),
    )


def simulation(
    kind: str = "1f1b",
    stage_ranks: tuple[int, ...] = (0, 1),
    num_microbatches: int = 3,
    *,
    forward_only: bool = False,
) -> Simulation:
    schedule = build_schedule(
        kind, stage_ranks=stage_ranks, num_microbatches=num_microbatches, forward_only=forward_only
    )
    return simulate(schedule, unit_costs(len(stage_ranks)))


def measured_as(simulated: Simulation, *, start_s: float = 0.0, waited_s: float = 0.0) -> list[MeasuredEvent]:
    """What a machine that works exactly as predicted would measure, on a clock that shows `start_s`."""
    return [
        MeasuredEvent(event.rank, event.action, event.start_s + start_s, event.end_s + start_s, waited_s)
        for event in simulated.events
    ]
