"""Ties between this rank and the others of a run: process groups, ways for messages, the watch over them."""

from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist

from shardwright.comm.blame import Blame
from shardwright.comm.local_peers import LocalPeers
from shardwright.comm.roll_call import RollCall
from shardwright.comm.transport import SmallCollectives, Transport
from shardwright.comm.whereabouts import Whereabouts


@dataclass(slots=True)
class ProcessGroups:
    """The process groups that this rank is in; None for a group of one rank.

    Attributes:
        model: ranks that share this replica.
        pipeline: those of them with its other stages, at the same place along the tensor axis.
        tensor: ranks that share a batch, and work on it together.
        inner: where they share it in two ways (`Mesh.inner`), those of them that share one part; else None.
        outer: likewise those of them that have other parts, at the same place in their inner groups.
        data: ranks that hold the same part of the model, one in each replica.
        shard: those of them that share its parameters.
        replica: those of them that have the same part of its parameters.
        alone: this rank, where something needs a group of it; made when first asked for.
    """

    model: dist.ProcessGroup | None = None
    pipeline: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None
    inner: dist.ProcessGroup | None = None
    outer: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None
    shard: dist.ProcessGroup | None = None
    replica: dist.ProcessGroup | None = None
    alone: dist.ProcessGroup | None = None

    def with_parts(self, num_ranks: int) -> dist.ProcessGroup | None:
        """So many ranks that have different parts of a parameter: those that share layers, or experts."""
        is_inner = self.inner is not None and dist.get_world_size(self.inner) == num_ranks
        return self.inner if is_inner else self.tensor


@dataclass(slots=True)
class Links:
    """The ways that messages of this rank take.

    Attributes:
        local_peers: to the other ranks of this host; None where messages take other ways.
        transport: activations and gradients between stages; None where a rank has the whole model.
        replica: small collectives of all ranks that share this replica; None where one has the whole model.
        stages: the same of those with its other stages.
        world: small collectives of all ranks; None for a single rank.
    """

    local_peers: LocalPeers | None = None
    transport: Transport | None = None
    replica: SmallCollectives | None = None
    stages: SmallCollectives | None = None
    world: SmallCollectives | None = None


class Host(NamedTuple):
    """The host of a rank, and the address from which that rank reaches the one that serves the store."""

    name: str
    address: str


@dataclass(slots=True)
class RankWatch:
    """The watch over ranks that fail, or do not come; None for a single rank.

    Attributes:
        blame: finds out which rank failed first.
        whereabouts: tells the others where this rank is in its script.
        roll_call: waits for ranks that are to make a call together.
        hosts: of all ranks.
    """

    blame: Blame | None = None
    whereabouts: Whereabouts | None = None
    roll_call: RollCall | None = None
    hosts: tuple[Host, ...] = ()
