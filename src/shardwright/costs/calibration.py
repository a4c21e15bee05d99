"""The efficiencies that ship with the package, and the errors of predictions by them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from math import exp
from typing import Any

from shardwright.cluster import NodeKind
from shardwright.costs.efficiencies import OF_ACCELERATORS, PRIORS, Efficiencies
from shardwright.costs.own_runtime import OWN
from shardwright.files.documents import parse_yaml

__all__ = [
    "REACHED",
    "TENTH",
    "Calibration",
    "calibration_of",
    "calibration_of_nodes",
    "document_of",
    "known_runtimes",
]

_FILE = "calibration.yaml"
_VERSION = 1
_UNSEEN = 1.5
"""What nobody measured in this combination errs by so much more."""

_BLIND_SPREAD = 0.25
"""Spread of the logarithm where nothing like it was measured: a quarter."""

_CHANGED = 1.25
"""So much wider are intervals where a runtime changed much from version to version."""

TENTH = 1.2816
"""Standard deviations of a normal distribution between its middle and its first tenth."""

_TWENTIETH = 1.6449

_OWN_RUNTIME = "shardwright"

_OF_LINKS = dict.fromkeys(
    (
        "link",
        "gather_link",
        "gather_network",
        "hierarchical_network",
        "reduce_network",
        "point_to_point",
    ),
    1.0,
)
_OF_COMPUTING = {"matmul": 1.0, "memory": 1.0}

REACHED: Mapping[str, float] = {**_OF_COMPUTING, **_OF_LINKS, "matmul_factor": 1.0}
"""Shares of rates that are those reached already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Efficiencies with what is known about their errors.

    Attributes:
        efficiencies: for `shardwright.costs.step_seconds`.
        spread: of ``log(predicted / measured)`` of runs that were left out of the fit.
        provenance: what they were fitted to.
    """

    efficiencies: Efficiencies
    spread: float
    provenance: str

    def interval(self, seconds: float) -> tuple[float, float]:
        """Between these two, eight of ten runs should be."""
        factor = exp(TENTH * self.spread)
        return seconds / factor, seconds * factor

    @property
    def error(self) -> float:
        """The relative error that nine of ten runs stay below."""
        return exp(_TWENTIETH * self.spread) - 1


@lru_cache(maxsize=1)
def known_runtimes() -> tuple[str, ...]:
    """Runtimes of which published runs on some accelerators were read, and our own."""
    found = {name for family in _document()["accelerators"].values() for name in family["runtimes"]}
    return tuple(sorted(found | {"shardwright"}))


def calibration_of(family: str, runtime: str = "shardwright") -> Calibration:
    """The efficiencies of a runtime on a family of accelerators.

    A runtime that was not measured there has those of the runtimes that were, and a wider interval; a family
    that was not has what publications and data sheets say of others.
    """
    families = _document()["accelerators"]
    known = families.get(family)
    own = OWN if runtime == _OWN_RUNTIME else {}
    medians = {name: prior.median for name, prior in PRIORS.items()} | own
    if known is None:
        text = f"not calibrated for {family}: what is usual on other accelerators"
        # No family that was measured errs by more than one that was not.
        widest = max(_widest(each) for each in families.values())
        return Calibration(
            efficiencies=Efficiencies(**medians),
            spread=_UNSEEN * max(widest, _BLIND_SPREAD),
            provenance=text,
        )
    medians |= known["common"]
    fitted = known["runtimes"].get(runtime)
    if fitted is not None:
        values = medians | fitted["efficiencies"]
        text = f"calibrated on {fitted['runs']} published runs of {runtime} on {family}"
        note = fitted.get("note", "")
        return Calibration(
            efficiencies=Efficiencies(**values),
            spread=fitted["spread"] * (_CHANGED if note else 1.0),
            provenance=f"{text}, {note}" if note else text,
        )
    return Calibration(
        efficiencies=Efficiencies(**medians),
        spread=_UNSEEN * max(_widest(known), _BLIND_SPREAD / 2),
        provenance=f"calibrated for {family}, by runs of {', '.join(known['runtimes'])}, not of {runtime}",
    )


def _widest(family: Mapping[str, Any]) -> float:
    """Of the spreads of a family's runtimes."""
    return max(float(each["spread"]) for each in family["runtimes"].values())


def calibration_of_nodes(kind: NodeKind, runtime: str = "shardwright") -> Calibration:
    """The efficiencies of a runtime on some nodes: what was measured there is reached in full."""
    found = calibration_of(kind.accelerator.family, runtime)
    full: dict[str, float] = {}
    if kind.accelerator.products:
        full |= _OF_COMPUTING
    if kind.source == "measured":
        full |= _OF_LINKS
    return replace(found, efficiencies=replace(found.efficiencies, **full)) if full else found


def document_of(families: Mapping[str, Any], *, created: str) -> dict[str, Any]:
    """The content of the file that ships: see ``benchmarks/published.py --write``."""
    return {"calibration_version": _VERSION, "created": created, "accelerators": dict(families)}


@lru_cache(maxsize=1)
def _document() -> dict[str, Any]:
    text = files("shardwright.costs").joinpath(_FILE).read_text(encoding="utf-8")
    found: dict[str, Any] = parse_yaml(text)
    unknown = {
        name
        for family in found["accelerators"].values()
        for name in family["common"]
        if name not in OF_ACCELERATORS
    }
    if found["calibration_version"] != _VERSION or unknown:
        raise AssertionError(f"{_FILE} is not of this version: {unknown or found['calibration_version']}")
    return found
