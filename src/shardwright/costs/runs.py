"""Measured runs, which efficiencies are fitted to and predictions are judged by."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.costs.inputs import Options, Rates
from shardwright.costs.shape import Shape

__all__ = ["MeasuredRun", "Runs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One run.

    Attributes:
        group: publication or table that it is from.
        accelerator: family of its accelerators, such as ``A100``.
        runtime: what ran it, such as ``megatron`` or ``shardwright``.
        step_s: seconds of a step.
    """

    name: str
    group: str
    accelerator: str
    runtime: str
    shape: Shape
    options: Options
    rates: Rates
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Many runs, as columns.

    Attributes:
        step_s: seconds of a step.
    """

    shape: Shape
    options: Options
    rates: Rates
    runtime: NDArray[np.str_]
    step_s: NDArray[np.float64]

    @classmethod
    def of(cls, runs: "list[MeasuredRun]") -> "Runs":
        """The runs as columns."""
        return cls(
            shape=_columns([run.shape for run in runs]),
            options=_columns([run.options for run in runs]),
            rates=_columns([run.rates for run in runs]),
            runtime=np.array([run.runtime for run in runs]),
            step_s=np.array([run.step_s for run in runs]),
        )


def _columns(rows: list[Any]) -> Any:
    kind = type(rows[0])
    return kind(**{f.name: np.array([float(getattr(row, f.name)) for row in rows]) for f in fields(kind)})
