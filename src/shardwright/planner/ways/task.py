"""The task of a topology search: a model, machines, a batch."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from shardwright.catalogue import LayerChain, Transformer
from shardwright.cluster import Inventory, usable_bytes
from shardwright.costs import (
    BF16,
    FLOAT8,
    FP32,
    Calibration,
    KindOfRank,
    Options,
    Precision,
    Rates,
    Shape,
    Sharded,
    calibration_of_nodes,
    known_runtimes,
    moment_bytes,
)
from shardwright.errors import ConfigError
from shardwright.quantities import MOST_RANKS
from shardwright.text import shown

MOST_BATCH = 10_000_000
_MOST_SEQUENCE = 100_000_000
_MOST_FROZEN_BYTES = 8


def runs_shards(kind: Sharded, *, shard: float, data: float) -> bool:
    """Whether the runtime divides this among so many of the replicas."""
    return kind == Sharded.NOTHING or (kind != Sharded.GRADIENTS and data % shard == 0)


def runs_experts(options: Options, *, num_experts: int) -> Any:
    """Whether the runtime has replicas share experts so; a number, or an array as the options are.

    It has the ranks of one batch share them, which are then as many as the replicas here, and have their
    samples. They may share layers or sequences, too; then all of them have different experts, and each has
    one. Shards are of replicas that have the same.
    """
    in_one_way = (options.context == 1) | (options.tensor == 1)
    of_samples = (options.expert > options.context) & (options.expert % options.context == 0)
    fits = (options.data % options.expert_samples == 0) & (options.expert * options.tensor <= num_experts)
    no_shards = np.asarray(options.sharded) == Sharded.NOTHING
    is_run = in_one_way & of_samples & fits & (no_shards | (np.asarray(options.as_here) > 0))
    return (options.expert == 1) | is_run


_HOST_MARGIN = 0.2  # of the host's, for the system and the loaders of data


@dataclass(frozen=True, kw_only=True)
class Task:
    """The task of a search.

    Attributes:
        model: the architecture, or a chain of layers, which is cut between them and in no other way.
        batch: samples of a step, over all replicas.
        sequence: tokens of a sample; None: as the model was trained.
        dtype: of the model: ``bfloat16``, ``float16``, with updates in float32, or ``float32``; ``float8`` is
            bfloat16 with products in 8 bits.
        optimizer: a name of `shardwright.costs.memory.OPTIMIZERS`, or the bytes that it keeps of a parameter
            beside a copy in float32.
        trained: share of the parameters that is trained; the others are frozen, as beside adapters. A
            chain of layers says itself which.
        frozen_bytes: bytes of a frozen parameter: 0.5 in 4 bits; None: as of the dtype.
        only_what_runs: leave out what this version's runtime does not have.
        operable: leave out degrees that nobody would operate: powers of two, and over several nodes at least
            two replicas, are left.
        pins: options that are given, by their names in `shardwright.costs.Options`.
    """

    model: Transformer | LayerChain
    machines: Inventory
    batch: int
    sequence: int | None = None
    dtype: str = "bfloat16"
    optimizer: str = "adamw"
    trained: float = 1.0
    frozen_bytes: float | None = None
    runtime: str = "shardwright"
    only_what_runs: bool = False
    operable: bool = False
    pins: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ranks = self.machines.num_ranks
        for name, value, most in (
            ("the number of ranks", ranks, MOST_RANKS),
            ("batch", self.batch, MOST_BATCH),
            ("sequence", 1 if self.sequence is None else self.sequence, _MOST_SEQUENCE),
        ):
            if not 1 <= value <= most:
                raise ConfigError(f"{name} is {shown(value)}, but it must be from 1 to {most}.")
        if self.runtime not in known_runtimes():
            near = difflib.get_close_matches(self.runtime, known_runtimes(), n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"they are {', '.join(known_runtimes())}."
            raise ConfigError(f"{shown(self.runtime)} is no runtime whose efficiencies are known; {hint}")
        if self.sequence is not None and isinstance(self.model, LayerChain):
            raise ConfigError(
                f"sequence is {self.sequence}, but a sample of {self.model.name} ({self.model.sample}) has "
                "no tokens. Leave it out."
            )
        moment_bytes(self.optimizer)
        self._check_frozen()
        if self.dtype == FLOAT8 and isinstance(self.model, LayerChain):
            raise ConfigError(
                f"dtype is float8, but {self.model.name} is a chain of layers, which is not priced in "
                "8 bits. Take bfloat16."
            )
        first, *others = (kind.accelerator for kind, _ in self.machines.nodes)
        if (other := next((each for each in others if each != first), None)) is not None:
            raise ConfigError(
                f"{self.machines.name} has {first.name} and {other.name}, and a search is over accelerators "
                "of one kind. Search each kind alone; shardwright plan --cluster deals layers over several."
            )
        for kind, _ in self.machines.nodes:
            rates = kind.accelerator.flops_per_s
            if self.dtype not in rates:
                raise ConfigError(
                    f"{kind.accelerator.name} has no rate for {shown(self.dtype)}; take one of "
                    f"{', '.join(rates)}."
                )

    def _check_frozen(self) -> None:
        if not 0 < self.trained <= 1:
            raise ConfigError(
                f"the trained share is {self.trained:g}, but it must be above 0, and at most 1."
            )
        if self.frozen_bytes is not None and not 0 < self.frozen_bytes <= _MOST_FROZEN_BYTES:
            raise ConfigError(
                f"bytes of a frozen parameter are {self.frozen_bytes:g}, but they must be above 0, and at "
                f"most {_MOST_FROZEN_BYTES}."
            )
        if isinstance(self.model, LayerChain) and (self.trained, self.frozen_bytes) != (1.0, None):
            raise ConfigError(
                f"{self.model.name} is made by a factory, and says itself what is trained, and in what type "
                "the rest is. Leave these options out, and have the factory freeze what is frozen."
            )

    @cached_property
    def shape(self) -> Shape:
        assert isinstance(self.model, Transformer)
        return Shape.of(self.model, sequence=self.sequence, trained=self.trained)

    @cached_property
    def rates(self) -> Rates:
        return Rates.of(self.machines, self.dtype)

    @cached_property
    def calibration(self) -> Calibration:
        """The calibration of the machines; of several families, the one with the widest interval."""
        found = (calibration_of_nodes(kind, self.runtime) for kind, _ in self.machines.nodes)
        return max(found, key=lambda calibration: calibration.spread)

    @property
    def precision(self) -> Precision:
        """Bytes of parameters and updates."""
        base = FP32 if self.dtype == "float32" else BF16
        frozen = base.weight if self.frozen_bytes is None else self.frozen_bytes
        weight = self.trained * base.weight + (1 - self.trained) * frozen
        return base._replace(weight=weight).with_moments(moment_bytes(self.optimizer))

    @property
    def flops(self) -> float:
        """FLOPs of a step, forward and backward, without what is recomputed."""
        if isinstance(self.model, LayerChain):
            return 3 * self.model.flops * self.batch
        return float(self.shape.flops_per_token) * self.tokens

    @property
    def tokens(self) -> int:
        return self.batch * self.tokens_of_sample

    @property
    def tokens_of_sample(self) -> int:
        return 1 if isinstance(self.model, LayerChain) else int(self.shape.sequence)

    @property
    def unit(self) -> str:
        """The unit of rates: ``tokens``, or ``samples``."""
        return "samples" if isinstance(self.model, LayerChain) else "tokens"

    @property
    def layers(self) -> int:
        if isinstance(self.model, LayerChain):
            return len(self.model.layers)
        return self.model.layers + self.model.encoder_layers

    @property
    def heads(self) -> int:
        """Heads that tensor parallelism may divide; 1 for a chain of layers."""
        return 1 if isinstance(self.model, LayerChain) else self.model.heads

    @property
    def experts(self) -> int:
        """Experts of a block; 1 for a chain of layers."""
        return 1 if isinstance(self.model, LayerChain) else self.model.experts

    @property
    def width(self) -> int:
        """Bytes of a number in the dtype."""
        return 4 if self.dtype == "float32" else 2

    @property
    def memory_bytes(self) -> int:
        """Memory that a rank may use, of the smallest accelerators."""
        return min(usable_bytes(kind) for kind, _ in self.machines.nodes)

    @cached_property
    def kind(self) -> KindOfRank:
        """The ranks; where links differ, on the slowest of the nodes."""
        return KindOfRank(
            ranks=self.machines.num_ranks,
            rates=self.rates,
            reached=self.calibration.efficiencies,
            memory_bytes=self.memory_bytes,
        )

    @property
    def host_bytes(self) -> int:
        """The part of the host's memory for what a rank offloads; 0 where it is not known."""
        shares = [kind.memory_bytes / kind.num_accelerators for kind, _ in self.machines.nodes]
        return 0 if self._on_cpus else int(min(shares) * (1 - _HOST_MARGIN))

    @property
    def has_host_memory(self) -> bool:
        """Whether there is memory besides that of the accelerators, which they reach."""
        return all(kind.accelerator.host_Bps > 0 and not kind.cores for kind, _ in self.machines.nodes)

    @property
    def _on_cpus(self) -> bool:
        return all(kind.cores > 0 for kind, _ in self.machines.nodes)
