"""One way to train: its options, its cost, and its description; prices of all of them at once.

Millions of ways are priced block by block: what the formulas have in their hands then stays in the caches
of a core.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.catalogue import LayerChain
from shardwright.costs import (
    Gathers,
    Offload,
    Options,
    Placement,
    Prices,
    RankBytes,
    Rates,
    Recompute,
    ScheduleKind,
    Sharded,
    chain_bytes,
    chain_prices,
    rank_bytes,
    transformer_fit,
    transformer_prices,
)
from shardwright.planner.ways.task import Task, runs_experts, runs_shards
from shardwright.quantities import format_bytes, format_seconds

_ROWS_OF_BLOCK = 2**14
"""A column of so many numbers takes 128 KiB."""


def prices_of(task: Task, ways: Options, *, faster: Mapping[str, float] = MappingProxyType({})) -> Prices:
    """Seconds and bytes of every way; `faster`: rates of the machines so many times as high."""
    kind = replace(task.kind, rates=_raised(task.rates, faster))
    if isinstance(task.model, LayerChain):
        return chain_prices(task.model, ways, [kind], kind.rates, precision=task.precision, width=task.width)
    return Prices.together(
        [transformer_prices(task.shape, block, kind, precision=task.precision) for block in _blocks(ways)]
    )


def memory_of(task: Task, ways: Options) -> tuple[RankBytes, Any]:
    """Memory of the neediest rank of every way, which is that closest to its limit; and that limit."""
    if isinstance(task.model, LayerChain):
        return chain_bytes(task.model, ways, [task.kind], precision=task.precision, width=task.width)
    blocks = [rank_bytes(task.shape, each, precision=task.precision) for each in _blocks(ways)]
    return RankBytes.together(blocks), float(task.memory_bytes)


def fits(task: Task, ways: Options) -> NDArray[np.bool_]:
    """Whether ways fit in the memory of accelerators, and what they offload in that of hosts."""
    if isinstance(task.model, LayerChain):
        num_bytes, limit = memory_of(task, ways)
        found = np.atleast_1d(num_bytes.total <= limit)
    else:
        found = np.concatenate(
            [
                np.atleast_1d(transformer_fit(task.shape, block, task.kind, precision=task.precision))
                for block in _blocks(ways)
            ]
        )
    offload = np.broadcast_to(ways.offload, found.shape)
    on_host = np.flatnonzero(found & (offload != Offload.NOTHING))
    if task.host_bytes and len(on_host):
        found[on_host] = memory_of(task, ways.take(on_host))[0].host <= task.host_bytes
    return found


def with_least_recomputation(task: Task, ways: Options, *, share: float = 1.0) -> Options:
    """Ways that fit, with as many `kept_layers` as a share of the memory has room for.

    Memory grows by as much with each block that keeps its activations, or by more where another rank
    becomes the neediest: what is worked out from the two ends fits in between.
    """
    if isinstance(task.model, LayerChain) or {"recompute", "kept_layers"} & set(task.pins):
        return ways
    # Of what goes to the host, more would be in the way there.
    chosen = np.flatnonzero((ways.recompute == Recompute.FULL) & (ways.offload != Offload.ACTIVATIONS))
    if not len(chosen):
        return ways
    some = ways.take(chosen)
    all_kept = np.floor(task.layers / some.pipeline)

    def free(kept: NDArray[np.float64]) -> NDArray[np.float64]:
        """Bytes that the neediest ranks leave of a share of the memory."""
        num_bytes, limit = memory_of(task, replace(some, kept_layers=kept))
        return np.asarray(share * limit - num_bytes.total)

    none_free, all_free = free(all_kept), free(0 * all_kept)
    kept = np.clip(np.floor(all_kept * all_free / np.maximum(all_free - none_free, 1.0)), 0.0, all_kept)
    kept = np.where(fits(task, replace(some, kept_layers=kept)), kept, 0.0)
    found = np.array(np.broadcast_to(ways.kept_layers, ways.pipeline.shape), dtype=float)
    found[chosen] = kept
    return replace(ways, kept_layers=found)


def _raised(rates: Rates, faster: Mapping[str, float]) -> Rates:
    return replace(rates, **{name: getattr(rates, name) * factor for name, factor in faster.items()})


def _blocks(ways: Options) -> Iterator[Options]:
    """Ways as columns, some thousands at a time; what is one number stays so."""
    number = len(np.atleast_1d(ways.pipeline))
    if number <= _ROWS_OF_BLOCK:
        yield ways
        return
    for start in range(0, number, _ROWS_OF_BLOCK):
        yield ways.take(slice(start, start + _ROWS_OF_BLOCK))


PARTS = {
    "compute": "computing",
    "recompute": "recomputation",
    "imbalance": "imbalance of stages",
    "tensor": "tensor parallel collectives",
    "context": "context parallel exchanges",
    "expert": "expert parallel exchanges",
    "bubble": "pipeline bubble",
    "point_to_point": "messages between stages",
    "gather": "gathers of parameters",
    "reduce_scatter": "reduce-scatters of gradients",
    "all_reduce": "all-reduces over replicas",
    "update": "optimizer",
    "offload": "transfers to the host",
    "overhead": "overhead of the runtime",
}
"""What the parts of a step are called."""

_MEMORY = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "gathered": "gathered parameters",
    "work": "work",
}
# What shards divide, by the names of Rajbhandari et al. (2020): optimizer state; gradients, too; all.
_ZERO = {Sharded.OPTIMIZER: "ZeRO-1", Sharded.GRADIENTS: "ZeRO-2", Sharded.PARAMETERS: "ZeRO-3"}
_LEAST_SHARE = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to train, priced.

    Attributes:
        options: of it; each a number.
        interval_s: between these, eight of ten runs should be.
        seconds: parts that add up to the step.
        num_bytes: parts that add up to what the neediest rank takes.
        tokens_per_s: of all ranks; of models whose samples have no tokens, samples.
        flops_per_s: of a rank, without what is recomputed.
        mfu: model FLOPs utilisation: their share of what the accelerators can do.
        dollars_per_million_tokens: None where a price is not known.
        runs_experts: replicas share experts as this version's runtime can, or share none.
        optimizer_state: the setting that keeps the optimizer's moments as the task has them.
    """

    options: Options
    step_s: float
    interval_s: tuple[float, float]
    seconds: dict[str, float]
    num_bytes: dict[str, int]
    limit_bytes: int
    provenance: str
    tokens_per_s: float
    flops_per_s: float
    mfu: float
    dollars_per_million_tokens: float | None
    runs_experts: bool
    optimizer_state: str

    @property
    def peak_bytes(self) -> int:
        return sum(self.num_bytes.values())

    @property
    def title(self) -> str:
        """In one line: ``tensor 8, pipeline 4 (1f1b), data 16; 8 microbatches of 2``."""
        o = self.options
        degrees = []
        for name in ("tensor", "context", "expert"):
            if getattr(o, name) > 1:
                degrees.append(f"{name} {int(getattr(o, name))}")
        if o.pipeline > 1:
            stages = f", {int(o.virtual)} stages a rank" if o.virtual > 1 else ""
            degrees.append(f"pipeline {int(o.pipeline)} ({self.schedule}{stages})")
        degrees.append(f"data {int(o.data)}")
        if o.sharded:
            degrees.append(f"{_ZERO[Sharded(int(o.sharded))]} over {int(o.shard)}")
        text = f"{', '.join(degrees)}; {_microbatches(o)}"
        if o.placement == Placement.DPT:
            text += "; replicas over nodes"
        if o.recompute != Recompute.NONE:
            text += f"; {Recompute(int(o.recompute)).name.lower()} recomputation"
        if o.recompute == Recompute.FULL and o.kept_layers:
            text += f" of all but {int(o.kept_layers)} layers a rank"
        if o.hierarchical == Gathers.FLAT and o.sharded >= Sharded.GRADIENTS:
            text += "; gathers in one ring"
        if o.offload:
            text += f"; {Offload(int(o.offload)).name.lower()} offloaded to CPU"
        return text

    @property
    def schedule(self) -> str:
        """The family of the pipeline's schedule."""
        return ScheduleKind(int(self.options.schedule)).family

    @property
    def not_run_yet(self) -> list[str]:
        """Parts of it that this version's runtime does not have."""
        o = self.options
        found = []
        kind = Sharded(int(o.sharded))
        alike = o.data // o.expert_samples if o.as_here else o.data
        if not runs_shards(kind, shard=o.shard, data=alike):
            found.append(f"{_ZERO[kind]} over {int(o.shard)} of {int(o.data * o.context)} ranks")
        if not self.runs_experts:
            found.append(f"experts over {int(o.expert)} ranks in a way with {self._beside_experts}")
        return found

    @property
    def _beside_experts(self) -> str:
        """What this version does not run beside experts that ranks share."""
        o = self.options
        if o.sharded:
            return _ZERO[Sharded(int(o.sharded))]
        return f"tensor {int(o.tensor)}, context {int(o.context)} and data {int(o.data)}"

    @property
    def memory_text(self) -> str:
        """The parts of the memory, largest first."""
        parts = sorted(self.num_bytes.items(), key=lambda part: -part[1])
        return ", ".join(f"{format_bytes(size)} {_MEMORY[name]}" for name, size in parts if size)

    @property
    def waterfall(self) -> list[tuple[str, float]]:
        """The parts of the step that count, largest first, and what is left; they add up to it."""
        ordered = sorted(self.seconds.items(), key=lambda part: -part[1])
        shown = [(PARTS[name], s) for name, s in ordered if s >= _LEAST_SHARE * self.step_s]
        rest = self.step_s - sum(s for _, s in shown)
        return [*shown, ("the rest", rest)] if rest > 0 else shown

    @property
    def settings(self) -> dict[str, Any]:
        """The settings for a training script; empty where this version does not run the way."""
        o = self.options
        if self.not_run_yet:
            return {}
        # The ranks that share experts share a batch: the samples of so many replicas here.
        found: dict[str, Any] = {
            "pipeline_parallel_degree": int(o.pipeline),
            "data_parallel_degree": int(o.data) // int(o.expert_samples),
            "microbatches": int(o.microbatches),
        }
        if o.tensor > 1:
            found["tensor_parallel_degree"] = int(o.tensor)
            found["sequence_parallel"] = bool(o.sequence_parallel)
        if o.context > 1:
            found["context_parallel_degree"] = int(o.context)
        if o.expert > 1:
            found["expert_parallel_degree"] = int(o.expert_samples)
        if o.pipeline > 1:
            found["pipeline"] = self.schedule
            found["placement_strategy"] = Placement(int(o.placement)).name
        if o.virtual > 1:
            found["virtual_stages"] = int(o.virtual)
        if o.sharded == Sharded.PARAMETERS:
            found["sharded_data_parallel_degree"] = int(o.shard)
        elif o.sharded:
            replicas = found["data_parallel_degree"]
            found["shard_optimizer_state"] = True if o.shard == replicas else int(o.shard)
        if o.recompute == Recompute.FULL:
            found["activation_checkpointing"] = "auto" if o.kept_layers else "full"
        if o.offload == Offload.ACTIVATIONS:
            found["offload_activations"] = True
        elif o.offload == Offload.OPTIMIZER:
            found["offload_optimizer"] = True
        if self.optimizer_state != "as_is":
            found["optimizer_state"] = self.optimizer_state
        return found

    def to_dict(self) -> Mapping[str, Any]:
        return {
            "title": self.title,
            "options": {f.name: int(getattr(self.options, f.name)) for f in fields(self.options)},
            "step_s": self.step_s,
            "interval_s": list(self.interval_s),
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
            "bytes": self.num_bytes,
            "limit_bytes": self.limit_bytes,
            "tokens_per_s": self.tokens_per_s,
            "flops_per_s_of_rank": self.flops_per_s,
            "mfu": self.mfu,
            "dollars_per_million_tokens": self.dollars_per_million_tokens,
            "provenance": self.provenance,
            "not_run_yet": self.not_run_yet,
            "settings": self.settings,
        }


def way_of(task: Task, options: Options) -> Way:
    if options.hierarchical == Gathers.FASTER:
        flat = replace(options, hierarchical=int(Gathers.FLAT))
        by_nodes = replace(options, hierarchical=int(Gathers.BY_NODES))
        options = min((by_nodes, flat), key=lambda way: float(prices_of(task, way).seconds.total))
    prices = prices_of(task, options)
    total = float(prices.seconds.total)
    price, ranks = task.machines.price_per_hour, task.machines.num_ranks
    peak = sum(
        kind.accelerator.flops_per_s[task.dtype] * kind.num_accelerators * number
        for kind, number in task.machines.nodes
    )
    return Way(
        options=options,
        step_s=total,
        interval_s=task.calibration.interval(total),
        seconds={name: float(getattr(prices.seconds, name)) for name in PARTS},
        num_bytes={name: int(getattr(prices.num_bytes, name)) for name in _MEMORY},
        limit_bytes=int(np.max(prices.limit)),
        provenance=task.calibration.provenance,
        tokens_per_s=task.tokens / total,
        flops_per_s=task.flops / total / ranks,
        mfu=task.flops / total / peak,
        dollars_per_million_tokens=None if price is None else price / 3600 * total / task.tokens * 1e6,
        optimizer_state=task.optimizer.removeprefix("adamw-") if "adamw-" in task.optimizer else "as_is",
        runs_experts=bool(runs_experts(options, num_experts=task.experts)),
    )


def _microbatches(options: Options) -> str:
    number, size = int(options.microbatches), int(options.microbatch)
    return f"{number} microbatch{'' if number == 1 else 'es'} of {size}"


def describe(way: Way) -> str:
    """In one line, with seconds and bytes."""
    return f"{way.title}: {format_seconds(way.step_s)} a step, {format_bytes(way.peak_bytes)} a rank"
