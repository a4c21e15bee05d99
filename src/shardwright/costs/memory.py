"""The memory of the neediest rank, in parts that add up to it.

Activations are those of a block (`kept`) times the microbatches in flight. The first and the last stage are
worked out; the one that needs more counts.
"""

from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from shardwright.costs.block import kept_bytes, tokens_of, whole_block_bytes
from shardwright.costs.inputs import Columns, Numbers, Offload, Options, Recompute, ScheduleKind, Sharded
from shardwright.costs.shape import Shape
from shardwright.errors import ConfigError
from shardwright.text import shown

_ON_THEIR_WAY = 3  # blocks of what is offloaded
_MOST_MOMENT_BYTES = 1000
_LIVE_BLOCKS = 2  # gathered ones: in use, and fetched ahead


class Precision(NamedTuple):
    """Bytes of a trained parameter.

    Attributes:
        optimizer: of what the optimizer keeps, with a copy in 32 bits where there is one.
    """

    weight: float
    gradient: int
    optimizer: float

    def with_moments(self, num_bytes: float) -> "Precision":
        """The same with another optimizer, by the bytes of its moments of a parameter."""
        return self._replace(optimizer=self.optimizer - OPTIMIZERS["adamw"] + num_bytes)


BF16 = Precision(2, 4, 12)
FP32 = Precision(4, 4, 8)

MOMENT_BYTES = MappingProxyType({"as_is": 4.0, "bf16": 2.0, "8bit": 1 + 4 / 256})
"""Bytes of a moment of a parameter, by the setting `optimizer_state`."""

OPTIMIZERS = MappingProxyType(
    {"adamw": 8.0, "adamw-bf16": 2 * MOMENT_BYTES["bf16"], "adamw-8bit": 2 * MOMENT_BYTES["8bit"], "sgd": 4.0}
)
"""Bytes of the moments of a parameter, by the name of an optimizer and of how it keeps them."""


def moment_bytes(optimizer: str) -> float:
    """Bytes of the moments of a parameter, by a name or a number."""
    try:
        found = OPTIMIZERS.get(optimizer) if optimizer in OPTIMIZERS else float(optimizer)
    except ValueError:
        found = None
    if found is None or not 0 <= found <= _MOST_MOMENT_BYTES:
        raise ConfigError(
            f"optimizer is {shown(optimizer)}, but it must be one of {', '.join(OPTIMIZERS)}, or a number "
            f"of bytes that it keeps of a parameter, from 0 to {_MOST_MOMENT_BYTES}."
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes(Columns):
    """Memory of a rank at its peak; all attributes but `host` together are the peak.

    Attributes:
        gathered: parameters and gradients of blocks that are at hand whole.
        work: of the block that is being computed, or of the loss.
        host: what is kept in the host's memory instead.
    """

    parameters: Numbers
    gradients: Numbers
    optimizer: Numbers
    activations: Numbers
    gathered: Numbers
    work: Numbers
    host: Numbers

    @property
    def total(self) -> Numbers:
        """At the peak, on the accelerator."""
        return sum(getattr(self, field.name) for field in fields(self) if field.name != "host")


def rank_bytes(shape: Shape, options: Options, *, precision: Precision = BF16) -> RankBytes:
    blocks = np.ceil(shape.layers / (options.pipeline * options.virtual) - 1e-9) * options.virtual
    first = stage_bytes(shape, options, blocks, last=False, precision=precision)
    last = stage_bytes(shape, options, blocks, last=True, precision=precision)
    return needier(first, last, last.total > first.total)


def needier(one: RankBytes, other: RankBytes, where: Numbers) -> RankBytes:
    """The bytes of `one`, and those of `other` `where` that is so; on the host, the most of both."""
    names = [field.name for field in fields(RankBytes)]
    found = {name: np.where(where, getattr(other, name), getattr(one, name)) for name in names}
    return RankBytes(**{**found, "host": np.maximum(one.host, other.host)})


def state_bytes(
    parameters: Numbers, options: Options, precision: Precision, *, trained: Numbers = 1.0
) -> tuple[Numbers, Numbers, Numbers]:
    """Bytes of parameters, gradients and optimizer state of a rank, which trains a share of so many."""
    stage, shard = options.sharded, options.shard
    weights = parameters * precision.weight / np.where(stage >= Sharded.PARAMETERS, shard, 1.0)
    gradients = trained * parameters * precision.gradient / np.where(stage >= Sharded.GRADIENTS, shard, 1.0)
    kept = trained * parameters * precision.optimizer / np.where(stage >= Sharded.OPTIMIZER, shard, 1.0)
    return weights, gradients, kept


def in_flight(options: Options, rank: Numbers = 0) -> Numbers:
    """Microbatches whose activations a pipeline rank keeps, in units of all its blocks.

    With 1F1B a rank begins one microbatch fewer than the one before it until its first backward; where the
    gradients of weights are put off, as many wait for those.
    """
    p, v, m, kind = options.pipeline, options.virtual, options.microbatches, options.schedule
    later = p - 1 - rank
    found = np.where(kind == ScheduleKind.ONE_F_ONE_B, later + 1, p)
    found = np.where(kind == ScheduleKind.GPIPE, m, found)
    found = np.where(kind == ScheduleKind.INTERLEAVED, ((v - 1) * p + 2 * later + 1) / v, found)
    found = np.where(kind == ScheduleKind.ZB_H2, 2 * p - 1, found)
    return np.where(p > 1, np.minimum(m, found), 1.0)


def offloaded(offload: Offload, options: Options, num_bytes: Numbers) -> tuple[Numbers, Numbers]:
    """Bytes of something that may be offloaded: on the accelerator, and on the host."""
    away = np.asarray(options.offload) == offload
    return np.where(away, 0.0, num_bytes), np.where(away, num_bytes, 0.0)


def offloaded_activations(options: Options, kept: Numbers, largest: Numbers) -> tuple[Numbers, Numbers]:
    """Bytes of activations that may be offloaded: on the accelerator, and on the host."""
    here, away = offloaded(Offload.ACTIVATIONS, options, kept)
    # One computes, one leaves, one comes back, as by `activation_loading_horizon` 1.
    on_their_way = np.where(np.asarray(away) > 0, np.minimum(_ON_THEIR_WAY * largest, kept), 0.0)
    return here + on_their_way, away


def stage_bytes(
    shape: Shape,
    options: Options,
    blocks: Numbers,
    *,
    last: bool,
    precision: Precision = BF16,
) -> RankBytes:
    """Memory of a pipeline rank with so many blocks; it grows by as much with each of them."""
    p, t = options.pipeline, options.tensor
    experts = np.maximum(1.0, shape.experts / options.expert)
    # Stages behind the first have no block without experts.
    dense = np.where(p > 1, 0.0, shape.dense)
    routed = (1 - dense) * experts * shape.mlp_parameters / t
    mlps = (1 - dense) * shape.shared_parameters + dense * shape.dense_parameters
    apart = (shape.attention_parameters + mlps) / t + shape.latent_parameters
    block = apart + routed
    owned = blocks * apart + shape.table_parameters(p) / t
    share = shape.trained
    states = state_bytes(owned, options, precision, trained=share)
    divided = replace(options, shard=options.expert_shard)
    of_experts = state_bytes(blocks * routed, divided, precision, trained=share)
    weights, gradients, kept = (one + other for one, other in zip(states, of_experts, strict=True))
    kept, states_on_host = offloaded(Offload.OPTIMIZER, options, kept)
    flight = in_flight(options, p - 1 if last else 0)
    kept_of_block = kept_bytes(shape, options)
    activations, activations_on_host = offloaded_activations(
        options, blocks * flight * kept_of_block, kept_of_block
    )
    live = _LIVE_BLOCKS * block * precision.weight + share * block * precision.gradient
    logits = tokens_of(shape, options) * (4 + options.width) * shape.vocabulary / t
    return RankBytes(
        parameters=weights,
        gradients=gradients,
        optimizer=kept,
        activations=activations,
        gathered=np.where(options.sharded >= Sharded.PARAMETERS, live, 0.0),
        work=np.maximum(_work_bytes(shape, options), np.where((p == 1) | last, logits, 0.0)),
        host=states_on_host + activations_on_host,
    )


def _work_bytes(shape: Shape, options: Options) -> Numbers:
    """Bytes of the block whose backward runs: its recomputed activations."""
    again = options.recompute != Recompute.NONE
    return np.where(again, whole_block_bytes(shape, options), 0.0)
