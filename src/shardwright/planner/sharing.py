"""The memory of replicas that shard parameters, or train in 16 bits.

Each of n sharding ranks keeps 1 / n of a large parameter, of its gradient and of its optimizer state. Until
gradients are reduced, each rank has whole ones instead: all of them if it accumulates several microbatches,
otherwise those of the bucket that is filled and of the one that is reduced. Over several hosts, each also
gathers the rows of others, up to the limit of gathered rows.
"""

import math
from dataclasses import dataclass, replace

from shardwright.cluster import Cluster
from shardwright.config import Config
from shardwright.mesh import Mesh
from shardwright.planner.chain import Chain, ParameterUse, StateBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The sharing of a stage's parameters among its replicas.

    Attributes:
        degree: ranks that share; 1: none do.
        threshold: elements below which a parameter is not shared.
        adds_up: gradients are added up over microbatches before they are reduced.
        gatherings: how often in a batch rows of other hosts are gathered where there is no room for all.
        reductions: how often in a batch gradients are reduced between the ranks that share.
        most_reduced: bytes of gradients that are reduced at once, at most.
        on_host: of the ranks that share, those on one host: together they have room for all rows where
            others are elsewhere.
        most_live: elements that may be gathered at once.
        updates: ranks with the same rows that share the optimizer's state; 1: none do.
        low_precision: parameters have 16 bits, gradients and updates 32.
    """

    degree: int = 1
    threshold: int = 0
    adds_up: bool = False
    on_host: int = 1
    most_live: int = 10**9
    gatherings: int = 1
    reductions: int = 1
    most_reduced: int = 0
    updates: int = 1
    low_precision: bool = False

    @classmethod
    def ways(cls, config: Config, mesh: Mesh, cluster: Cluster, *, num_microbatches: int) -> list["Sharing"]:
        """The ways that the settings leave open, from the fastest to the one with the least memory."""
        if num_microbatches == 1 or mesh.shard == 1:
            choices = [False]
        elif config.sdp_reduce_every_microbatch is None:
            choices = [False, True]
        else:
            choices = [config.sdp_reduce_every_microbatch]
        return [
            cls._way(config, mesh, cluster, num_microbatches=num_microbatches, every=every)
            for every in choices
        ]

    @classmethod
    def _way(
        cls, config: Config, mesh: Mesh, cluster: Cluster, *, num_microbatches: int, every: bool
    ) -> "Sharing":
        group = mesh.group("dp_shard", 0)
        hosts = [rank // cluster.ranks_per_node for rank in group]
        return cls(
            degree=mesh.shard,
            threshold=config.sdp_param_persistence_threshold,
            adds_up=num_microbatches > 1 and not every,
            gatherings=2 * num_microbatches,
            reductions=num_microbatches if every else 1,
            most_reduced=4 * config.sdp_reduce_bucket_size,
            on_host=hosts.count(hosts[0]),
            most_live=config.sdp_max_live_parameters,
            updates=mesh.data // mesh.shard if config.shard_optimizer_state else 1,
            low_precision=config.bf16 or config.fp16,
        )

    def applied(self, chain: Chain) -> Chain:
        """The chain, with the memory that its parameters take on each rank."""
        if self.degree == self.updates == 1 and not self.low_precision:
            return chain
        parameters = tuple(map(self._applied, chain.parameters))
        widest = max((u.num_bytes / u.num_elements for u in parameters if u.shared is not None), default=0)
        return replace(
            chain,
            parameters=parameters,
            most_gathered=math.ceil(self.most_live * widest / self.on_host),
            gatherings=self.gatherings,
            reductions=self.reductions,
            most_reduced=0 if self.adds_up or self.degree == 1 else self.most_reduced,
        )

    def _applied(self, use: ParameterUse) -> ParameterUse:
        shares = self.degree > 1 and not use.is_buffer and use.num_elements >= max(1, self.threshold)
        shared = self._shared(use) if shares else None
        return replace(use, shared=shared, updates=self.updates, wide=2 if self.low_precision else 1)

    def _shared(self, use: ParameterUse) -> StateBytes:
        part = -(-use.num_bytes // self.degree)
        gathered = -(-use.num_bytes // self.on_host) if self.on_host < self.degree else 0
        trained = part if use.trained else 0
        gradients = use.num_bytes if use.trained and self.adds_up else trained
        return StateBytes(parameters=part, gradients=gradients, optimized=trained, gathered=gathered)
