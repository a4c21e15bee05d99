"""Measured runs, which efficiencies are fitted to and predictions are judged by.

Fits efficiencies to measured runs.

An accelerator parameter is one number for all runs; a runtime parameter is one for each runtime. The fit is
the most likely set of them: least squares on ``log(predicted / measured)``, with the logarithms of the
parameters drawn to their priors. No parameter belongs to a run or to a model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.costs.calibration import OF_ACCELERATORS, PRIORS, Efficiencies
from shardwright.costs.inputs import Options, Rates
from shardwright.costs.memory import BF16, Precision
from shardwright.costs.shape import Shape
from shardwright.costs.step import step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One run.

    Attributes:
        group: publication or table that it is from.
        accelerator: family of its accelerators, such as ``A100``.
        runtime: what ran it, such as ``megatron`` or ``shardwright``.
        year: of the publication, where that counts.
        precision: bytes of a weight, its gradient and what the optimizer keeps for it.
    """

    name: str
    group: str
    accelerator: str
    runtime: str
    shape: Shape
    options: Options
    rates: Rates
    step_s: float
    year: int | None = None
    dtype: str = ""
    precision: Precision = BF16


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
_MOVED = 0.01  # of a logarithm, for a slope: wide enough to see past an edge between two cases of a formula
_MOST_STEPS = 200  # a fit ends early, or creeps along an edge between two cases of a formula


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

    @property
    def places(self) -> list[NDArray[np.intp]]:
        """For each name, the place of the parameter of each run."""
        return list(self._places.values())

    @property
    def alike(self) -> Floats:
        """Ones at the places of each name: (names, parameters)."""
        found = np.zeros((len(self._places), len(self.prior)))
        for row, place in zip(found, self.places, strict=True):
            row[place] = 1.0
        return found

    def efficiencies(self, logarithms: Floats) -> Efficiencies:
        values = np.exp(logarithms)
        return Efficiencies(**{name: values[..., place] for name, place in self._places.items()})

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
    nearly = _solve(parameters, runs, everything, begin=parameters.prior)
    # A search that edges slowed down goes on with long steps.
    return parameters.named(_solve(parameters, runs, everything, begin=nearly))


def ratios(runs: Runs, fitted: Fit) -> Floats:
    return np.exp(_errors(_Parameters(runs.runtime), runs, fitted.logarithms))


def leave_out(
    runs: Runs, fitted: Fit, *, folds: Sequence[Any] | None = None, told: Callable[[int, int], None]
) -> Floats:
    """Predicted / measured of each run by a fit to others, which knows nothing of it.

    Each search for such a fit begins at the one to all runs, which is close by.

    Args:
        folds: a name for each run; those with the same one are left out together. None: each alone.
        told: called with the runs done, and all of them.
    """
    parameters = _Parameters(runs.runtime)
    number = len(runs.step_s)
    names = np.array(folds if folds is not None else range(number))
    found, done = np.ones(number), 0
    for name in dict.fromkeys(names.tolist()):
        left_out = names == name
        logarithms = _solve(parameters, runs, ~left_out, begin=fitted.logarithms)
        found[left_out] = np.exp(_errors(parameters, runs, logarithms)[left_out])
        done += int(left_out.sum())
        told(done, number)
    return found


def _errors(parameters: _Parameters, runs: Runs, logarithms: Floats) -> Floats:
    """Of all runs, by one set of parameters, or by several: (..., parameters) to (..., runs)."""
    reached = parameters.efficiencies(logarithms)
    predicted = step_seconds(runs.shape, runs.options, runs.rates, reached).total
    return np.asarray(np.log(predicted / runs.step_s))


def _slopes(parameters: _Parameters, runs: Runs, logarithms: Floats) -> tuple[Floats, Floats]:
    """Errors, and how they change with each parameter: (runs,) and (runs, parameters).

    A run has one parameter of each name: those of all runtimes are moved at once, all names side by side.
    """
    moves = _MOVED * parameters.alike
    number = len(moves)
    moved = np.concatenate([logarithms + moves, logarithms - moves, logarithms[None]])
    errors = _errors(parameters, runs, moved)
    changes = (errors[:number] - errors[number:-1]) / (2 * _MOVED)
    slopes = np.zeros((errors.shape[-1], len(logarithms)))
    for place, change in zip(parameters.places, changes, strict=True):
        slopes[np.arange(len(place)), place] = change
    return errors[-1], slopes


def _tempered(errors: Floats) -> Floats:
    """Errors whose squares grow like the errors themselves where these are large (the pseudo-Huber loss).

    One run that was slow for a reason of its own would else pull at the parameters as much as nine others.
    """
    return np.asarray(errors * np.sqrt(2 / (1 + np.sqrt(1 + (errors / _LARGE) ** 2))))


def _tempered_slopes(errors: Floats) -> Floats:
    root = np.sqrt(1 + (errors / _LARGE) ** 2)
    return np.asarray(np.sqrt((1 + root) / 2) / root)


def _solve(parameters: _Parameters, runs: Runs, chosen: NDArray[np.bool_], *, begin: Floats) -> Floats:
    # Here, because predictions do without it.
    from scipy.optimize import least_squares

    def residuals(deviations: Floats) -> Floats:
        errors = _errors(parameters, runs, at(deviations))[chosen] / _NOISE
        return np.concatenate([_tempered(errors), deviations])

    def slopes(deviations: Floats) -> Floats:
        errors, change = (each[chosen] / _NOISE for each in _slopes(parameters, runs, at(deviations)))
        return np.concatenate(
            [_tempered_slopes(errors)[:, None] * change * parameters.spread, np.eye(len(deviations))]
        )

    def at(deviations: Floats) -> Floats:
        return np.asarray(parameters.prior + deviations * parameters.spread)

    found = least_squares(
        residuals,
        (begin - parameters.prior) / parameters.spread,
        jac=slopes,
        method="lm",
        ftol=_TOLERANCE,
        xtol=_TOLERANCE,
        max_nfev=_MOST_STEPS,
    )
    return at(np.asarray(found.x))
