"""The inputs of a step's cost: numbers, or arrays with an entry per candidate.

All fields of a class may be numbers or arrays of one length; numpy broadcasts them against one another. So
the same formulas price a million ways to train one model, or a table of runs of different models.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from shardwright.cluster import Inventory

Numbers = Any
"""A float, or an array of them."""

FLOAT8 = "float8"
"""The dtype of runs whose products with the weights of blocks are in 8 bits, and all else in 16."""


class Recompute(IntEnum):
    """The part of a forward that the backward recomputes."""

    NONE = 0
    SELECTIVE = 1
    FULL = 2


class ScheduleKind(IntEnum):
    """Families of pipeline schedules; ZB_H2 is known from publications only."""

    GPIPE = 0
    ONE_F_ONE_B = 1
    INTERLEAVED = 2
    ZB_H1 = 3
    ZB_V = 4
    ZB_H2 = 5

    @property
    def family(self) -> str:
        """Its name among settings, plans and schedules."""
        return ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "zb_h2")[self]

    @classmethod
    def of(cls, family: str) -> "ScheduleKind":
        return next(kind for kind in cls if kind.family == family)


class Sharded(IntEnum):
    """The state that the ranks of a shard group divide, by ZeRO's stages."""

    NOTHING = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    PARAMETERS = 3


class Hides(IntEnum):
    """The sums of tensor parallel ranks that run beside products.

    BACKWARD: those of inputs' gradients, beside the gradients of weights where these are not delayed. CHUNKS:
    with sequence parallelism all of them, each in parts beside the product that makes or takes them; without
    it, as BACKWARD.
    """

    NOTHING = 0
    BACKWARD = 1
    CHUNKS = 2


class Dispatch(IntEnum):
    """To whom a token goes once on its way to its experts.

    NODE: to each node that has some, and inside of it to each rank, as DeepEP does. RANK: to each rank that
    has some. EXPERT: to each of them, as Megatron's ``alltoall`` does.
    """

    NODE = 0
    RANK = 1
    EXPERT = 2


class Offload(IntEnum):
    """The state kept in host memory."""

    NOTHING = 0
    OPTIMIZER = 1
    ACTIVATIONS = 2


class Gathers(IntEnum):
    """The algorithms by which groups on several nodes gather and reduce-scatter.

    FLAT: in one ring. BY_NODES: over nodes and inside of them at the same time, each byte entering a node
    once. FASTER: the one of them that is.
    """

    FLAT = 0
    BY_NODES = 1
    FASTER = 2


class Placement(IntEnum):
    """The order of ranks, as in `placement_strategy`: the last letter varies fastest.

    PDT: replicas of a stage are neighbours, and pipelines go over nodes. DPT: the other way round.
    """

    PDT = 0
    DPT = 1


class Columns:
    """Fields that are numbers or arrays."""

    def take(self, chosen: NDArray[Any] | slice) -> Self:
        """The entries of some candidates; what is one number for all stays so."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return type(self)(**{name: v[chosen] if np.ndim(v) else v for name, v in values.items()})

    @classmethod
    def together(cls, parts: Sequence[Self]) -> Self:
        """The entries of all parts, in their order."""
        columns = {f.name: [getattr(part, f.name) for part in parts] for f in fields(cls)}  # type: ignore[arg-type]
        return parts[0] if len(parts) == 1 else cls(**{name: _joined(each) for name, each in columns.items()})


def _joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], Columns):
        return type(parts[0]).together(parts)
    return np.concatenate(parts, axis=-1) if np.ndim(parts[0]) else parts[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Columns):
    """Ways to train.

    Attributes:
        sharded: what they divide; see `Sharded`.
        expert: ranks with different experts, of all replicas and those that share their sequences.
        as_here: 1 where replicas share states as in this library: shard groups are of ranks with the same
            experts, and ZeRO-1 sums whole gradients and gathers what each rank has updated. Else groups are
            of neighbours, which divide experts by the fewer, and gradients are scattered.
        kept_layers: blocks of a pipeline rank that full recomputation leaves out.
        sequence_parallel: 1 where tensor parallel ranks divide what is between their products, too.
        hides_sums: which of their sums run beside those products; see `Hides`.
        dispatch: to whom a token goes once on its way to its experts; see `Dispatch`.
        flash: 1 for fused attention that keeps no scores.
        whole_layers: 1 where every stage has as many blocks as any other, however long the head takes.
        width: bytes of an activation, a weight that is moved, a gradient that is sent: 2 in 16 bits, else 4.
        float8: 1 where products with the weights of blocks, and what they keep of inputs, are in 8 bits.
        fused: 1 where what is between products is fused, and keeps what its backward needs alone.
        stops_early: 1 where a block is computed again no further than its backward needs.
    """

    tensor: Numbers = 1.0
    pipeline: Numbers = 1.0
    virtual: Numbers = 1.0
    data: Numbers = 1.0
    shard: Numbers = 1.0
    sharded: Numbers = 0
    context: Numbers = 1.0
    expert: Numbers = 1.0
    as_here: Numbers = 0
    microbatch: Numbers = 1.0
    microbatches: Numbers = 1.0
    schedule: Numbers = int(ScheduleKind.ONE_F_ONE_B)
    recompute: Numbers = int(Recompute.NONE)
    kept_layers: Numbers = 0
    offload: Numbers = int(Offload.NOTHING)
    sequence_parallel: Numbers = 0
    hides_sums: Numbers = int(Hides.NOTHING)
    dispatch: Numbers = int(Dispatch.NODE)
    flash: Numbers = 1
    hierarchical: Numbers = int(Gathers.BY_NODES)
    whole_layers: Numbers = 0
    placement: Numbers = int(Placement.PDT)
    width: Numbers = 2.0
    float8: Numbers = 0
    fused: Numbers = 0
    stops_early: Numbers = 0

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))

    @property
    def num_ranks(self) -> Numbers:
        return self.tensor * self.pipeline * self.data * self.context

    def recomputed(self, layers: Numbers) -> Numbers:
        """Share of the blocks that full recomputation computes again, of a model with so many."""
        kept = np.asarray(self.kept_layers) * self.pipeline / layers
        return np.where(np.asarray(self.recompute) == Recompute.FULL, np.clip(1.0 - kept, 0.0, 1.0), 0.0)

    @property
    def delays_weights(self) -> Numbers:
        """Whether gradients of weights fill a pipeline's bubble."""
        split = np.asarray(self.schedule) >= ScheduleKind.ZB_H1
        return split & (np.asarray(self.pipeline) > 1)

    @property
    def expert_shard(self) -> Numbers:
        """Replicas that divide the states of an expert: those of a shard group that hold the same experts."""
        return np.where(np.asarray(self.as_here) > 0, self.shard, np.maximum(1.0, self.shard / self.expert))

    @property
    def shard_stride(self) -> Numbers:
        """Ranks from one of a shard group to the next."""
        apart = np.asarray(self.as_here) > 0
        return np.where(apart, self.replica_stride * self.expert_samples, self.inner_stride)

    @property
    def expert_samples(self) -> Numbers:
        """Replicas that share experts: ranks that share a sequence have different ones, too."""
        return np.maximum(1.0, self.expert / self.context)

    @property
    def replica_stride(self) -> Numbers:
        """Ranks from one replica of a rank to the next."""
        inner = np.where(np.asarray(self.placement) == Placement.DPT, self.pipeline, 1.0)
        return self.tensor * self.context * inner

    @property
    def inner_stride(self) -> Numbers:
        """Ranks from one of those that share a sequence, or experts, to the next."""
        return self.replica_stride / self.context

    @property
    def pipeline_span(self) -> Numbers:
        """Ranks among which those of a pipeline lie."""
        inner = np.asarray(self.placement) == Placement.DPT
        return np.where(inner, self.tensor * self.context * self.pipeline, self.num_ranks)

    @property
    def global_batch(self) -> Numbers:
        return self.data * self.microbatch * self.microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates(Columns):
    """Machines, by their peak rates; of several kinds of nodes, the slowest.

    Attributes:
        flops_per_s: of dense matrix products in the dtype of the run; of one with products in 8 bits, in 16.
        link_Bps: of an accelerator to others of its node, one direction.
        network_Bps: of a node to other nodes, one direction.
        host_Bps: to the host's memory, one direction; 0 where there is none.
        hop_Bps: of a node to the node of the next stage; 0: as to any other.
        float8_flops_per_s: of products in 8 bits; 0 where there are none.
    """

    flops_per_s: Numbers
    memory_Bps: Numbers
    link_Bps: Numbers
    network_Bps: Numbers
    per_node: Numbers
    link_latency_s: Numbers = 1e-5
    network_latency_s: Numbers = 2e-5
    host_Bps: Numbers = 25e9
    hop_Bps: Numbers = 0.0
    float8_flops_per_s: Numbers = 0.0

    @classmethod
    def of(cls, machines: Inventory, dtype: str = "bfloat16") -> "Rates":
        """The slowest of some machines, rate by rate."""
        kinds = [kind for kind, _ in machines.nodes]
        wide = "bfloat16" if dtype == FLOAT8 else dtype
        network = [kind.network_Bps for kind in kinds]
        if len(kinds) > 1 and machines.between_kinds_Bps is not None:
            network.append(machines.between_kinds_Bps)
        return cls(
            flops_per_s=min(kind.accelerator.flops_per_s[wide] for kind in kinds),
            float8_flops_per_s=min(kind.accelerator.flops_per_s.get(FLOAT8, 0.0) for kind in kinds),
            memory_Bps=min(kind.accelerator.memory_Bps for kind in kinds),
            link_Bps=min(kind.link_Bps for kind in kinds),
            network_Bps=min(network),
            per_node=float(min(kind.num_accelerators for kind in kinds)),
            link_latency_s=max(kind.link_latency_s for kind in kinds),
            network_latency_s=max(kind.network_latency_s for kind in kinds),
            host_Bps=min(kind.accelerator.host_Bps for kind in kinds),
        )
