"""Measured runs, which efficiencies are fitted to and predictions are judged by.

Fits efficiencies to measured runs.

An accelerator parameter is one number for all runs; a runtime parameter is one for each runtime. The fit is
the most likely set of them: least squares on ``log(predicted / measured)``, with the logarithms of the
parameters drawn to their priors. No parameter belongs to a run or to a model.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.costs.calibration import OF_ACCELERATORS, PRIORS, Efficiencies
from shardwright.costs.inputs import Options, Rates
from shardwright.costs.shape import Shape
from shardwright.costs.step import step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One run.

    Attributes:
        group: publication or table that it is from.
        accelerator: family of its accelerators, such as ``A100``.
        runtime: what ran it, such as ``megatron`` or ``shardwright``.
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
    """Many runs, as columns."""

    shape: Shape
    options: Options
    rates: Rates
    runtime: NDArray[np.str_]
    step_s: NDArray[np.float64]

    @classmethod
    def of(cls, runs: "list[MeasuredRun]") -> "Runs":
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


Floats = NDArray[np.float64]

_NOISE = 0.05  # runs of one setup differ by so much
_LARGE = 2.0  # errors from so many times that noise on count by their size, not by their square
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Fit:
    """Efficiencies of a family of accelerators.

    Attributes:
        logarithms: all of them, in the order of the fit.
    """

    of_accelerators: dict[str, float]
    of_runtimes: dict[str, dict[str, float]]
    logarithms: Floats


class _Parameters:
    """The places of runtimes' parameters in a vector."""

    def __init__(self, runtimes: NDArray[np.str_]):
        self.runtimes = sorted(set(runtimes.tolist()))
        self._places: dict[str, NDArray[np.intp]] = {}
        number = np.searchsorted(np.array(self.runtimes), runtimes)
        medians: list[float] = []
        spreads: list[float] = []
        self._first: dict[str, int] = {}
        for name in Efficiencies.names():
            own = name in OF_ACCELERATORS
            self._first[name] = len(medians)
            self._places[name] = len(medians) + (np.zeros_like(number) if own else number)
            copies = 1 if own else len(self.runtimes)
            medians += [PRIORS[name].median] * copies
            spreads += [PRIORS[name].spread] * copies
        self.prior = np.log(medians)
        self.spread = np.array(spreads)

    def efficiencies(self, logarithms: Floats) -> Efficiencies:
        values = np.exp(logarithms)
        return Efficiencies(**{name: values[place] for name, place in self._places.items()})

    def named(self, logarithms: Floats) -> Fit:
        values = np.exp(logarithms).tolist()
        common = {name: values[first] for name, first in self._first.items() if name in OF_ACCELERATORS}
        by_runtime = {
            runtime: {
                name: values[first + number]
                for name, first in self._first.items()
                if name not in OF_ACCELERATORS
            }
            for number, runtime in enumerate(self.runtimes)
        }
        return Fit(of_accelerators=common, of_runtimes=by_runtime, logarithms=logarithms)


def fit(runs: Runs) -> Fit:
    """Fits the efficiencies to runs on one family of accelerators."""
    parameters = _Parameters(runs.runtime)
    everything = np.ones(len(runs.step_s), dtype=bool)
    return parameters.named(_solve(parameters, runs, everything))


def ratios(runs: Runs, fitted: Fit) -> Floats:
    return np.exp(_errors(_Parameters(runs.runtime), runs, fitted.logarithms))


def leave_out(runs: Runs, *, num_folds: int | None = None) -> Floats:
    """Predicted / measured of each run by a fit to others, which knows nothing of it."""
    parameters = _Parameters(runs.runtime)
    number = len(runs.step_s)
    fold = np.arange(number) % (num_folds or number)
    found = np.ones(number)
    for left_out in range(int(fold.max()) + 1):
        chosen = fold != left_out
        logarithms = _solve(parameters, runs, chosen)
        found[~chosen] = np.exp(_errors(parameters, runs, logarithms)[~chosen])
    return found


def _errors(parameters: _Parameters, runs: Runs, logarithms: Floats) -> Floats:
    reached = parameters.efficiencies(logarithms)
    predicted = step_seconds(runs.shape, runs.options, runs.rates, reached).total
    return np.asarray(np.log(predicted / runs.step_s))


def _tempered(errors: Floats) -> Floats:
    """Errors whose squares grow like the errors themselves where these are large (the pseudo-Huber loss).

    One run that was slow for a reason of its own would else pull at the parameters as much as nine others.
    """
    return np.asarray(np.sign(errors) * _LARGE * np.sqrt(2 * (np.sqrt(1 + (errors / _LARGE) ** 2) - 1)))


def _solve(parameters: _Parameters, runs: Runs, chosen: NDArray[np.bool_]) -> Floats:
    # Here, because predictions do without it.
    from scipy.optimize import least_squares

    def residuals(deviations: Floats) -> Floats:
        errors = _errors(parameters, runs, at(deviations))[chosen] / _NOISE
        return np.concatenate([_tempered(errors), deviations])

    def at(deviations: Floats) -> Floats:
        return np.asarray(parameters.prior + deviations * parameters.spread)

    begin = np.zeros_like(parameters.prior)
    found = least_squares(residuals, begin, method="lm", ftol=_TOLERANCE, xtol=_TOLERANCE)
    return at(np.asarray(found.x))
