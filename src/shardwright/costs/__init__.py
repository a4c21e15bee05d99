"""Prices a training step in closed form, in seconds and bytes, for many candidates at once."""

from shardwright.costs.calibration import (
    Calibration,
    Efficiencies,
    calibration_of,
    calibration_of_nodes,
    known_runtimes,
)
from shardwright.costs.chain import chain_bytes, chain_seconds, mixed_chain
from shardwright.costs.inputs import (
    Gathers,
    Offload,
    Options,
    Placement,
    Rates,
    Recompute,
    ScheduleKind,
    Sharded,
)
from shardwright.costs.kinds import KindOfRank, MixedPrices, mixed_fit, mixed_prices
from shardwright.costs.memory import BF16, FP32, Precision, RankBytes, rank_bytes
from shardwright.costs.shape import Shape
from shardwright.costs.step import StepSeconds, step_seconds

__all__ = [
    "BF16",
    "FP32",
    "Calibration",
    "Efficiencies",
    "Gathers",
    "KindOfRank",
    "MixedPrices",
    "Offload",
    "Options",
    "Placement",
    "Precision",
    "RankBytes",
    "Rates",
    "Recompute",
    "ScheduleKind",
    "Shape",
    "Sharded",
    "StepSeconds",
    "calibration_of",
    "calibration_of_nodes",
    "chain_bytes",
    "chain_seconds",
    "known_runtimes",
    "mixed_chain",
    "mixed_fit",
    "mixed_prices",
    "rank_bytes",
    "step_seconds",
]
