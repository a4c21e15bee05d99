"""Ties between this rank and the others of a run: process groups, ways for messages, the watch over them."""

from dataclasses import dataclass

import torch.distributed as dist

from shardwright.comm.absence.blame import Blame
from shardwright.comm.absence.whereabouts import Whereabouts
from shardwright.comm.messages.roll_call import RollCall
from shardwright.comm.messages.small_collectives import SmallCollectives
from shardwright.comm.messages.transport import Transport
from shardwright.comm.one_host.local_peers import LocalPeers

__all__ = ["Links", "ProcessGroups", "RankWatch"]


@dataclass(slots=True)
class ProcessGroups:
    """The process groups that this rank is in; None for a group of one rank.

    Attributes:
        model: ranks that share this replica.
        pipeline: those of them with its other stages, at the same place along the tensor axis.
        tensor: ranks that share a batch, and work on it together.
        layers: those of them that share the same sequences, each with other parts of layers; None where no
            ranks share both.
        sequences: those of them with the same parts of layers; likewise.
        data: ranks that hold the same part of the model, one in each replica.
        shard: those of them that share its parameters.
        replica: those of them that have the same part of its parameters.
        alone: this rank, where something needs a group of it; made when first asked for.
    """

    model: dist.ProcessGroup | None = None
    pipeline: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None
    layers: dist.ProcessGroup | None = None
    sequences: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None
    shard: dist.ProcessGroup | None = None
    replica: dist.ProcessGroup | None = None
    alone: dist.ProcessGroup | None = None

    @property
    def parts(self) -> dist.ProcessGroup | None:
        """Ranks that have different parts of the parameters of this stage, where some are divided."""
        return self.tensor if self.layers is None else self.layers


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


@dataclass(slots=True)
class RankWatch:
    """The watch over ranks that fail, or do not come; None for a single rank.

    Attributes:
        blame: finds out which rank failed first.
        whereabouts: tells the others where this rank is in its script.
        roll_call: waits for ranks that are to make a call together.
    """

    blame: Blame | None = None
    whereabouts: Whereabouts | None = None
    roll_call: RollCall | None = None
