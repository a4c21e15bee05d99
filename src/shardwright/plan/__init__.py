"""The plan of a run: its file, the conditions of its prediction, and the difference of two plans."""

from shardwright.plan.plan import (
    PLAN_VERSION,
    Alternative,
    MemoryPrediction,
    MeshPlan,
    ModelIdentity,
    Plan,
    Prediction,
    SchedulePlan,
    StagePlan,
    StagePrediction,
    Trial,
    align,
    identity,
    stage_of_label,
)

__all__ = [
    "PLAN_VERSION",
    "Alternative",
    "MemoryPrediction",
    "MeshPlan",
    "ModelIdentity",
    "Plan",
    "Prediction",
    "SchedulePlan",
    "StagePlan",
    "StagePrediction",
    "Trial",
    "align",
    "identity",
    "stage_of_label",
]
