"""The measured overheads of Shardwright's runtime. Others are fitted to published runs."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib.resources import files
from math import exp
from typing import Any, NamedTuple

from shardwright.cluster import NodeKind
from shardwright.costs.inputs import Dispatch, Hides, Numbers
from shardwright.files.documents import parse_yaml

ACTION_S = 8e-5
"""Seconds that the runtime itself takes for an action, measured by ``benchmarks/pipeline.py --only E``.

A forward takes about 115 us and a backward 45, sends of small messages included: this is their mean, which
also counts for both parts of a backward that is split.
"""

STEP_S = 4e-3
"""Seconds for which a rank keeps its core busy before the first action of a step and after the last one.

It agrees on the batch, looks at attributes of the model and hands out results: 2.5 ms on a quiet machine, 5
to 7 ms on a slow one, whatever the microbatches and the number of ranks (2 and 4 on two cores).
"""

UNIT_S = 2e-5
"""Seconds that the call of a unit takes however small it is; its backward takes as long again twice."""

DIVIDED_OPERATION_S = 25e-6
"""Seconds that an operation on divided tensors takes beyond its own, where that is not measured.

In a loop of nothing else it is 6 us (``benchmarks/tensor_dispatch.py``). Between the products of a step, that
push its code out of the caches, it is four times as much.
"""

OFFLOADED_CALL_S = 0.7e-3
"""Seconds that a rank takes to hand over what a call of a unit keeps, in its forward; and again to get it.

A transformer's block keeps some 23 tensors in 8 storages, for which the rank's own thread takes 0.45 to
0.6 ms in each direction. The rest is waiting for the thread that copies, which takes Python's lock in turn.
"""

_OWN = {"layer_s": 3 * UNIT_S, "microbatch_s": 2 * ACTION_S, "step_s": STEP_S}
"""The same, as parameters of `Efficiencies`."""


class _Prior(NamedTuple):
    """The prior of a parameter before any measurement: a log-normal distribution."""

    median: float
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiencies:
    """Numbers, or arrays with an entry for each candidate.

    Attributes:
        matmul: share of the peak that large matrix products reach.
        half_size: size of a product's smallest side at which it takes twice as long as it should.
        memory: share of the peak that memory reaches.
        elementwise: bytes that elementwise kernels move, as a multiple of 64 a token and hidden element.
        scores_bytes: bytes that attention without fusion moves, for each score.
        scores: share of the peak that its products reach.
        flash_forward: share of the peak of fused attention, forward.
        update: share of the peak that the optimizer's memory traffic reaches.
        float8: of products in 8 bits, on `matmul`.
        link: share of the link's rate that collectives inside of a node reach.
        matmul_factor: of the runtime's kernels, on `matmul`.
        grouped: of its products of experts, on both.
        attention_factor: of the runtime's attention, on its seconds.
        gather_network: share of the network's rate that gathers and reduce-scatters reach.
        gather_link: share of the link's rate that they reach.
        hierarchical_network: share of the network's rate where they know about nodes.
        reduce_network: share of the network's rate that all-reduces over replicas reach; above 1 where
            computing hides a part of them.
        point_to_point: share of a link's rate that messages between stages reach.
        exchange: share of the network's rate that exchanges of experts' tokens reach; likewise.
        contention: the network's rate falls with the nodes of a group, to the power of so much.
        exposed: share of gathers, reduce-scatters, sums and messages that no computing hides.
        layer_s: seconds of a block and microbatch, whatever its size.
        microbatch_s: seconds of a microbatch, whatever its size.
        step_s: seconds of a step, whatever its size.
    """

    matmul: Numbers
    half_size: Numbers
    memory: Numbers
    elementwise: Numbers
    scores_bytes: Numbers
    scores: Numbers
    flash_forward: Numbers
    flash_backward: Numbers
    kernel_s: Numbers
    update: Numbers
    float8: Numbers
    link: Numbers
    matmul_factor: Numbers
    grouped: Numbers
    attention_factor: Numbers
    gather_network: Numbers
    gather_link: Numbers
    hierarchical_network: Numbers
    reduce_network: Numbers
    point_to_point: Numbers
    exchange: Numbers
    contention: Numbers
    exposed: Numbers
    layer_s: Numbers
    microbatch_s: Numbers
    step_s: Numbers

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))


OF_ACCELERATORS = frozenset(Efficiencies.names()[:11])
"""Parameters of a family of accelerators; the others are those of a runtime on it."""

PRIORS: dict[str, _Prior] = {
    "matmul": _Prior(0.8, 0.15),
    "half_size": _Prior(25, 0.5),
    "memory": _Prior(0.8, 0.1),
    "elementwise": _Prior(1.0, 0.3),
    "scores_bytes": _Prior(12, 0.4),
    "scores": _Prior(0.4, 0.5),
    "flash_forward": _Prior(0.55, 0.3),
    "flash_backward": _Prior(0.45, 0.3),
    "kernel_s": _Prior(6e-6, 0.4),
    "update": _Prior(0.6, 0.5),
    "float8": _Prior(0.75, 0.2),
    "link": _Prior(0.6, 0.3),
    "matmul_factor": _Prior(1.0, 0.1),
    "grouped": _Prior(0.7, 0.3),
    "attention_factor": _Prior(1.0, 0.3),
    "gather_network": _Prior(0.4, 0.5),
    "gather_link": _Prior(0.6, 0.4),
    "hierarchical_network": _Prior(0.55, 0.4),
    "reduce_network": _Prior(0.5, 0.5),
    "point_to_point": _Prior(0.5, 0.6),
    "exchange": _Prior(0.6, 0.5),
    "contention": _Prior(0.03, 0.5),
    "exposed": _Prior(0.2, 0.6),
    "layer_s": _Prior(1e-4, 1.0),
    "microbatch_s": _Prior(1e-3, 1.0),
    "step_s": _Prior(0.03, 1.0),
}
"""From publications and data sheets; wide where these differ."""


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

_FUSED_RUNTIMES = frozenset({"automodel", "megascale", "megatron"})
"""Runtimes with kernels of their own for what is between products, which keep less for the backward."""

_STOPS_EARLY = frozenset({"automodel", "fms-fsdp", "torchtitan"})
"""Runtimes that recompute with ``torch.utils.checkpoint`` since torch 2.1, which ends once it has all."""

_HIDES_SUMS = {"megascale": Hides.CHUNKS, "megatron": Hides.CHUNKS, "nanotron": Hides.BACKWARD}


def ways_of(runtime: str) -> dict[str, int]:
    """The fields of `Options` that a runtime decides."""
    return {
        "fused": int(runtime in _FUSED_RUNTIMES),
        "stops_early": int(runtime in _STOPS_EARLY),
        "hides_sums": int(_HIDES_SUMS.get(runtime, Hides.NOTHING)),
        "dispatch": int(Dispatch.RANK if runtime == _OWN_RUNTIME else Dispatch.NODE),
    }


_OF_LINKS = dict.fromkeys(
    (
        "link",
        "gather_link",
        "gather_network",
        "hierarchical_network",
        "reduce_network",
        "point_to_point",
        "exchange",
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
        network_Bps: of a node of the runs, the fastest; 0: of none.
    """

    efficiencies: Efficiencies
    spread: float
    provenance: str
    network_Bps: float = 0.0

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
    own = _OWN if runtime == _OWN_RUNTIME else {}
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
            network_Bps=fitted["network_Bps"],
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
    """The efficiencies of a runtime on some nodes: what was measured there is reached in full.

    Of messages over a slower network than that of the published runs, computing hides a smaller part.
    """
    found = calibration_of(kind.accelerator.family, runtime)
    full: dict[str, float] = {}
    for name in ("exchange", "reduce_network"):
        beyond = getattr(found.efficiencies, name) - 1
        if beyond > 0:
            full[name] = 1 + beyond * min(1.0, kind.network_Bps / found.network_Bps)
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
