"""Profiles of a model's units, estimated or measured, and the samples that statistics need.

Unlike all other layers, such layers compute something else once a batch is cut into microbatches. So the
planner, where it is free to choose, cuts the batch into few: a microbatch has 16 samples or more, or as many
as it can. (Torchvision's and Detectron's recipes have 16 on a device; below it the error of batch norms
grows, see Wu and He, "Group Normalization", 2018, figure 1.)

Estimated seconds come from `costs.price`, which prices every way to train, plus an overhead per unit call.
For units that compute with trained parameters, the weight gradients are a part of the backward.

``shardwright profile`` writes the file, and ``plan --profile`` reads it. It holds the costs of units, by cost
class, and the machines of the measurement; the model is traced anew. So one file serves every number of ranks
and every grid, as long as microbatches have measured sizes; the costs of other sizes are estimated, and plans
say so.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Annotated, Literal

from pydantic import Field

from shardwright import __version__
from shardwright.cluster import Cluster, Device
from shardwright.config import Config
from shardwright.costs import calibration_of
from shardwright.costs.links import RankRates
from shardwright.errors import ConfigError, PlanError
from shardwright.files import Record, UserFile, replace_file
from shardwright.model_graph import ModelGraph, Node, Work
from shardwright.profile import Profile, UnitCost
from shardwright.quantities import MOST_RANKS, counted
from shardwright.text import shortened

NOT_CUT_FURTHER = "not cut further"
"""Ends the reason for few microbatches, by which others know that more are none to advise."""

ENOUGH_SAMPLES = 16


def count_groups(
    candidates: Mapping[int, tuple[ModelGraph, Profile]], counts: Sequence[int], *, config: Config
) -> list[list[int]]:
    """Numbers of microbatches in the order in which to try them: those with enough samples come first."""
    layers = _layers(candidates)
    if not layers:
        return [list(counts)]
    if config.microbatches is not None:
        return [list(counts)]
    enough = [m for m in counts if candidates[m][0].batch_size >= ENOUGH_SAMPLES] or [min(counts)]
    rest = [m for m in counts if m not in enough]
    return [enough, rest] if rest else [enough]


def statistics_reasons(
    candidates: Mapping[int, tuple[ModelGraph, Profile]], microbatches: int, *, config: Config, group: int
) -> tuple[str, ...]:
    """The plan's remarks on layers with statistics; empty if there are none."""
    layers, samples = _layers(candidates), candidates[microbatches][0].batch_size
    if not layers:
        return ()
    if microbatches == 1:
        return (f"Statistics over the batch ({_sample(layers)}) are those of all of it, one microbatch.",)
    text = f"Statistics over the batch ({_sample(layers)}) are those of a microbatch, "
    text += counted(samples, "sample")
    if config.microbatches is not None:
        return (f"{text}.",)
    if group:
        return (f"{text}: more in each would not fit in memory.",)
    goal = "for" if samples >= ENOUGH_SAMPLES else "to come close to"
    return (f"{text}: {goal} {ENOUGH_SAMPLES} or more in each, the batch is {NOT_CUT_FURTHER}.",)


def statistics_are_split(layers: Sequence[str], *, samples: int, batch: int) -> str:
    """The warning about statistics over a microbatch, with the remedy.

    >>> statistics_are_split(["bn"], samples=4, batch=32)[:93]
    '1 layer (bn) computes statistics over the 4 samples of a microbatch, not over the 32 of the b'
    """
    number, size = counted(len(layers), "layer"), counted(samples, "sample")
    computes = "computes" if len(layers) == 1 else "compute"
    return (
        f"{number} ({_sample(layers)}) {computes} statistics over the {size} of a microbatch, not "
        f"over the {batch} of the batch, as in a loop over the microbatches. For those of the whole batch "
        "set microbatches to 1."
    )


def _layers(candidates: Mapping[int, tuple[ModelGraph, Profile]]) -> tuple[str, ...]:
    """The layers with statistics, over all microbatch sizes: a trace of a single sample misses some."""
    found = (name for graph, _ in candidates.values() for name in graph.batch_statistics)
    return tuple(dict.fromkeys(found))


def _sample(layers: Sequence[str]) -> str:
    """``bn1, bn2, bn3 and 5 more``."""
    return shortened([layer or "the model" for layer in layers])


def microbatch_counts(batch_size: int, *, config: Config, pipeline: int) -> tuple[int, ...]:
    """Into how many microbatches a batch could be split: what to trace and profile for `make_plan`.

    >>> microbatch_counts(32, config=Config(), pipeline=4)
    (4, 8, 16, 32)
    """
    if batch_size < 1:
        raise PlanError("the batch is empty: it has no samples along its axis.")
    if config.microbatches is not None:
        if config.microbatches > batch_size:
            raise PlanError(too_few_samples("a batch of a replica", batch_size, config.microbatches))
        return (config.microbatches,)
    divisors = [d for d in range(1, batch_size + 1) if batch_size % d == 0]
    found = set()
    for wanted in (pipeline, 2 * pipeline, 4 * pipeline, 8 * pipeline):
        # Equal microbatches waste nothing: take the nearest divisor, unless none is near.
        nearest = min(divisors, key=lambda d: (max(d / wanted, wanted / d), d))
        near = max(nearest / wanted, wanted / nearest) <= 1.5
        found.add(nearest if near else min(wanted, batch_size))
    return tuple(sorted(found))


def too_few_samples(batch: str, num_samples: int, microbatches: int) -> str:
    """The error for a batch without one sample per microbatch, and the remedy.

    >>> too_few_samples("the batch", 1, 2)[:77]
    'the batch has 1 sample, but microbatches is 2: each needs at least one sample'
    """
    samples, most = f"{num_samples} samples", f"at most {num_samples}"
    if num_samples == 1:
        samples, most = "1 sample", "1"
    return (
        f"{batch} has {samples}, but microbatches is {microbatches}: each needs at least one sample. Use "
        f"batches of {microbatches} or more, or set microbatches to {most}."
    )


MEASURED_ERROR, _ESTIMATED_ERROR = 0.15, 0.5
"""The worst of ``benchmarks/planner.py`` on one host, and what is common where units were not measured;
docs/benchmarks.md."""


def estimate_profile(graph: ModelGraph, *, device: Device) -> Profile:
    rates = _rates(device)
    costs: dict[str, UnitCost] = {}
    for node in graph.nodes:
        if not node.free and node.cost_class not in costs and (node.cost_class or node.kind == "unit"):
            costs[node.cost_class] = _estimate(graph, node, rates, device.overhead_s)
    return Profile(costs=costs, device=device.name)


def error_of(provenance: str, device: Device) -> float:
    """The relative error of predictions from measured or estimated units of a device."""
    if provenance == "measured":
        return MEASURED_ERROR
    known = calibration_of(device.family).error if device.family else None
    return _ESTIMATED_ERROR if known is None else known


def _rates(device: Device) -> RankRates:
    """A device's rates are those that are reached; its family tells what attention and kernels take."""
    finer = calibration_of(device.family).efficiencies
    reached = replace(finer, matmul=device.reached, matmul_factor=1.0, memory=1.0)
    return RankRates(peak=device.flops_per_s, memory=device.memory_Bps, reached=reached)


def _estimate(graph: ModelGraph, node: Node, rates: RankRates, overhead_s: float) -> UnitCost:
    inputs = [graph.values[value].spec for value in node.inputs]
    outputs = [graph.values[value].spec for value in node.outputs]
    own = graph.units[node.name].parameters if node.kind == "unit" else ()
    held = [graph.parameters[name] for name in dict.fromkeys((*own, *node.parameters))]
    input_bytes = sum(spec.num_bytes for spec in inputs)
    around = input_bytes + sum(spec.num_bytes for spec in (*outputs, *(p.spec for p in held)))
    work = Work(product_flops=node.flops, moved_bytes=around) if node.work is None else node.work
    price = rates.price(work)
    call_s = overhead_s * (node.kind == "unit")
    has_backward = any(spec.requires_grad for spec in outputs)
    sizes = [(p.spec.requires_grad, prod(p.spec.shape)) for p in held if not p.is_buffer]
    trained = any(requires_grad for requires_grad, _ in sizes)
    frozen = sum(size for requires_grad, size in sizes if not requires_grad)
    of_frozen = price.weight * frozen / max(1, sum(size for _, size in sizes))
    # One that leaves nothing for later stays in one piece, as under autocast.
    is_split = has_backward and trained and node.flops and node.kind == "unit" and node.weight_bytes != 0
    return UnitCost(
        forward_s=price.forward + call_s,
        backward_s=price.backward - of_frozen + 2 * call_s if has_backward else 0.0,
        weight_s=price.weight - of_frozen if is_split else 0.0,
        saved_bytes=node.saved_bytes,
        work_bytes=node.work_bytes,
        weight_bytes=node.weight_bytes,
        split_work_bytes=node.split_work_bytes,
        input_bytes=input_bytes,
        flops=node.flops,
        provenance="estimated",
    )


class MeasuredProfile(Record):
    """The measured costs of a model's units on some machines; the file has these fields.

    Attributes:
        fingerprint: of the model, as plans have it.
    """

    format: Literal["shardwright-profile"] = "shardwright-profile"
    version: Literal[1] = 1
    created_by: str = f"shardwright {__version__}"
    fingerprint: str
    num_ranks: Annotated[int, Field(ge=1, le=MOST_RANKS)]
    when: str
    cluster: Cluster
    costs: dict[str, UnitCost]

    def write(self, path: str | os.PathLike[str]) -> None:
        replace_file(path, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "MeasuredProfile":
        advice = "shardwright profile makes it anew"
        file = UserFile(path, what="profile", error=ConfigError, advice=advice)
        return file.model(cls, file.read_json())
