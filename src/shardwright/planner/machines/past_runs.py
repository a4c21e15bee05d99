"""Corrects predictions by the measured steps of earlier runs on the same machines.

The ratio of measured to predicted step varies little between runs of one model and kind on one machine. It
covers the load of a shared machine and the effects that the cost model omits. So the median ratio of the
latest runs corrects the next ones, the more runs the more strongly; the spread around it is the interval that
plans state.

Code of the step function outside of the model (a frozen teacher) is in no profile; each rank runs it as it
is. What it took in the last run is added to the next prediction, and is no part of the ratio.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardwright.mesh import Mesh

__all__ = ["NO_CORRECTION", "Correction", "PastRun", "RunKind", "correction_of"]

_LATEST = 20
_FEWEST = 3
# As if so many runs had come out as predicted.
_CAUTION = 2
_FEWEST_FOR_INTERVAL = 5
_SHARE_INSIDE = 0.9
_NARROWEST = 0.02
_LEAST_OUTSIDE = 0.02  # of a step: what code outside of the model takes beyond that is told

_MEASURED, _ESTIMATED = 0.15, 0.5
"""Where no run has told better: the worst of ``benchmarks/planner.py`` on one host, and what is common where
units were not measured; docs/benchmarks.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKind:
    """The features shared by runs whose predictions err alike.

    Attributes:
        ranks: of the job.
        ranks_per_node: of a host.
        pipelined: there are several pipeline ranks.
        replicated: there are several replicas.
        shared: replicas share their parameters.
        divided: ranks share the layers of a stage.
    """

    ranks: int
    ranks_per_node: int
    pipelined: bool
    replicated: bool
    shared: bool
    divided: bool = False

    @classmethod
    def of(cls, mesh: Mesh, *, ranks_per_node: int) -> "RunKind":
        """The kind of a run on a grid of ranks."""
        return cls(
            ranks=mesh.world_size,
            ranks_per_node=ranks_per_node,
            pipelined=mesh.pipeline > 1,
            replicated=mesh.data > 1,
            shared=mesh.shard > 1,
            divided=mesh.share > 1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """A run that is over, or has gone on for a while.

    Attributes:
        run: tells it from others; of two entries of one run, the later counts.
        kind: what it has in common with others.
        model: fingerprint.
        samples: of a step of one replica; 0 in entries of versions that did not write it.
        outside_s: the part of `measured_s` in code outside of the model; 0 in entries of versions that did
            not write it.
        predicted_s: seconds of a step, before any correction.
        measured_s: the median of its steps.
        steps: that were timed.
        predicted_bytes: peak memory of the rank that needs most.
        measured_bytes: the same, as the operating system or the device counts it, libraries included.
        when: date and time, UTC.
    """

    run: str
    kind: RunKind
    model: str
    predicted_s: float
    measured_s: float
    steps: int
    predicted_bytes: int
    measured_bytes: int
    when: str
    samples: int = 0
    outside_s: float = 0.0

    @property
    def told_outside_s(self) -> float:
        """`outside_s`, where it is enough to count."""
        return self.outside_s if self.outside_s > _LEAST_OUTSIDE * self.measured_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """A form that `json` can write."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: Any) -> "PastRun":
        """Reads the output of `to_dict`.

        Raises:
            ValueError: it is something else.
        """
        try:
            found = cls(**{**document, "kind": RunKind(**document["kind"])})
            usable = 0 < found.predicted_s < math.inf and 0 < found.measured_s < math.inf
            usable = usable and 0 <= found.outside_s < found.measured_s
        except (TypeError, KeyError) as error:
            raise ValueError(f"this is no past run: {error}") from error
        if not usable:
            raise ValueError("this is no past run: its seconds are no positive numbers")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What earlier runs of a kind change in predictions.

    Attributes:
        factor: measured over predicted.
        outside_s: seconds of a step outside of the model in the last run, which are added.
        error: half of an interval that held nine of ten runs, relative; None where too few are known.
        runs: that it rests on.
    """

    factor: float = 1.0
    error: float | None = None
    runs: int = 0
    outside_s: float = 0.0

    def error_of(self, provenance: str, *, estimates: float | None = None) -> float:
        """The error of predictions; where few runs are known, the common one of measured or estimated units.

        Args:
            provenance: of the costs of units.
            estimates: what estimated units are off on such devices; None: what is common.
        """
        if self.error is not None:
            return self.error
        if provenance == "measured":
            return _MEASURED
        return _ESTIMATED if estimates is None else estimates


NO_CORRECTION = Correction()


def correction_of(runs: Iterable[PastRun], kind: RunKind, *, model: str, samples: int) -> Correction:
    """The correction by the latest runs of a kind, model and batch: small steps err otherwise.

    Args:
        runs: in the order in which they were written down.
        kind: of the run that is planned.
        model: fingerprint of its model.
        samples: of a step of one of its replicas.
    """
    alike = (run for run in runs if (run.kind, run.model, run.samples) == (kind, model, samples))
    latest = list({run.run: run for run in alike}.values())[-_LATEST:]
    outside_s = latest[-1].told_outside_s if latest else 0.0
    ratios = [math.log((run.measured_s - run.told_outside_s) / run.predicted_s) for run in latest]
    if len(ratios) < _FEWEST:
        return replace(NO_CORRECTION, outside_s=outside_s)
    factor = statistics.median(ratios) * len(ratios) / (len(ratios) + _CAUTION)
    return Correction(
        factor=math.exp(factor), error=_interval(ratios, factor), runs=len(ratios), outside_s=outside_s
    )


def _interval(ratios: Sequence[float], factor: float) -> float | None:
    if len(ratios) < _FEWEST_FOR_INTERVAL:
        return None
    errors = sorted(abs(math.expm1(ratio - factor)) for ratio in ratios)
    return max(_NARROWEST, errors[math.ceil(_SHARE_INSIDE * len(errors)) - 1])
