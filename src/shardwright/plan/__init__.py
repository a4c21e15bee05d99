"""The plan of a run: its file, the conditions of its prediction, and the difference of two plans."""

from shardwright.plan.decision import (
    Alternative,
    MeshPlan,
    ModelIdentity,
    SchedulePlan,
    StagePlan,
    identity,
)
from shardwright.plan.plan import PLAN_VERSION, REMEDY, Plan, stage_of_label
from shardwright.plan.prediction import MemoryPrediction, Prediction, StagePrediction
from shardwright.plan.tensor_plan import TensorPlan, TensorPrices

__all__ = [
    "PLAN_VERSION",
    "REMEDY",
    "Alternative",
    "MemoryPrediction",
    "MeshPlan",
    "ModelIdentity",
    "Plan",
    "Prediction",
    "SchedulePlan",
    "StagePlan",
    "StagePrediction",
    "TensorPlan",
    "TensorPrices",
    "identity",
    "stage_of_label",
]
