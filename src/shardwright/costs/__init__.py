"""Prices a training step in closed form, in seconds and bytes, for many candidates at once."""

from shardwright.costs.calibration import (
    Calibration,
    Efficiencies,
    calibration_of,
    calibration_of_nodes,
    known_runtimes,
    ways_of,
)
from shardwright.costs.chain import chain_bytes, chain_prices
from shardwright.costs.inputs import (
    FLOAT8,
    Dispatch,
    Gathers,
    Hides,
    Offload,
    Options,
    Placement,
    Rates,
    Recompute,
    ScheduleKind,
    Sharded,
)
from shardwright.costs.kinds import KindOfRank, Prices, transformer_fit, transformer_prices
from shardwright.costs.memory import (
    BF16,
    FP32,
    MOMENT_BYTES,
    Precision,
    RankBytes,
    moment_bytes,
    rank_bytes,
)
from shardwright.costs.shape import Shape
from shardwright.costs.step import StepSeconds, step_seconds

__all__ = [
    "BF16",
    "FLOAT8",
    "FP32",
    "MOMENT_BYTES",
    "Calibration",
    "Dispatch",
    "Efficiencies",
    "Gathers",
    "Hides",
    "KindOfRank",
    "Offload",
    "Options",
    "Placement",
    "Precision",
    "Prices",
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
    "chain_prices",
    "known_runtimes",
    "moment_bytes",
    "rank_bytes",
    "step_seconds",
    "transformer_fit",
    "transformer_prices",
    "ways_of",
]
