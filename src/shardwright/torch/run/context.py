"""The state of a run: settings, ranks, process groups, the wrapped model. `init` makes the one object."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwright.cluster import Cluster
from shardwright.comm.absence.blame import Blame
from shardwright.comm.absence.whereabouts import Whereabouts
from shardwright.comm.encoding.codec import declare
from shardwright.comm.joining.process_group import group_of, tell_from
from shardwright.comm.messages.roll_call import RollCall
from shardwright.comm.messages.small_collectives import SmallCollectives
from shardwright.comm.messages.transport import Transport
from shardwright.comm.one_host.local_peers import LocalPeers
from shardwright.config import Config
from shardwright.errors import ShardwrightError, UsageError
from shardwright.mesh import Axes, Mesh
from shardwright.plan import Plan
from shardwright.torch.run.roles import Reports, WrappedModel, WrappedOptimizer

__all__ = ["Context", "context", "is_initialized", "set_context"]

declare(Plan)

_T = TypeVar("_T")


@dataclass(slots=True)
class Context:
    """Everything that belongs to one run.

    Attributes:
        config: the settings.
        mesh: the grid of ranks.
        rank: this world rank.
        local_rank: rank on this host.
        local_size: ranks on this host.
        device: where this rank computes.
        pipeline_group: ranks that share this replica; None for a single rank.
        data_group: ranks that hold the same stage; None for a single rank.
        shard_group: those of them that share its parameters; None where each has all of them.
        replica_group: those of them that have the same part of it; None for a single rank.
        local_peers: ways to the other ranks of this host; None where messages take other ways.
        transport: messages inside the replica.
        replica: small collectives inside the replica.
        world: small collectives of all ranks.
        plan: the plan in force; None until the first step, unless one was given.
        cluster: the present machines, once they were measured.
        blame: finds out which rank failed first; None for a single rank.
        whereabouts: where this rank is in its script, for the others; None for a single rank.
        roll_call: waits for ranks that are to make a call together; None for a single rank.
        reporter: tells the observer what happens.
        model: the wrapped model.
        optimizers: the wrapped optimizers.
        cleanup: what `shutdown` takes back.
    """

    config: Config
    mesh: Mesh
    rank: int
    local_rank: int
    local_size: int
    device: torch.device
    pipeline_group: dist.ProcessGroup | None = None
    data_group: dist.ProcessGroup | None = None
    shard_group: dist.ProcessGroup | None = None
    replica_group: dist.ProcessGroup | None = None
    local_peers: LocalPeers | None = None
    transport: Transport | None = None
    replica: SmallCollectives | None = None
    world: SmallCollectives | None = None
    plan: Plan | None = None
    cluster: Cluster | None = None
    reporter: Reports | None = None
    blame: Blame | None = None
    whereabouts: Whereabouts | None = None
    roll_call: RollCall | None = None
    model: WrappedModel | None = None
    optimizers: list[WrappedOptimizer] = field(default_factory=list)
    cleanup: ExitStack = field(default_factory=ExitStack)
    _alone: dist.ProcessGroup | None = None

    @property
    def pipeline_rank(self) -> int:
        """Position in the pipeline, from 0."""
        return self.mesh.group_rank("pp", self.rank)

    @property
    def data_rank(self) -> int:
        """Which replica, from 0."""
        return self.mesh.group_rank("rdp", self.rank)

    @property
    def pipeline_ranks(self) -> tuple[int, ...]:
        """World ranks of this replica, by pipeline rank."""
        return self.mesh.group("pp", self.rank)

    def group_of_replicas(self) -> dist.ProcessGroup | None:
        """One rank of each replica, this one of its own; None for a single rank."""
        if self.mesh.world_size == 1:
            return None
        if self.mesh.data > 1:
            return self.data_group
        if self._alone is None:
            timeout = timedelta(seconds=self.config.timeout_s)
            self._alone = dist.new_group([self.rank], timeout=timeout, use_local_synchronization=True)
        return self._alone

    def further_group(self, axes: Axes, *, use: str, backend: str | None = None) -> dist.ProcessGroup:
        """A group of its own for a use.

        Collective over all ranks, which make all groups along these axes in the same order.
        """
        timeout_s = self.config.timeout_s
        made = {
            ranks: group_of(ranks, use=use, timeout_s=timeout_s, backend=backend)
            for ranks in self.mesh.groups(axes)
        }
        return made[self.mesh.group(axes, self.rank)]

    def from_first_rank(self, make: Callable[[], _T]) -> _T:
        """Broadcasts the first rank's result, of kinds that `codec` takes; collective over all ranks.

        The ranks fail together.

        Raises:
            ShardwrightError: what `make` raised on the first rank, or that it raised something else there.
        """
        made: list[Any] = [None]
        unexpected: Exception | None = None
        if self.rank == 0:
            try:
                made[0] = make()
            except ShardwrightError as error:
                made[0] = error
            except Exception as error:
                unexpected = error
                made[0] = ShardwrightError(f"rank 0 has failed: {type(error).__name__}: {error}")
        if self.mesh.world_size > 1:
            made[0] = tell_from(0, made[0])
        if unexpected is not None:
            raise unexpected
        if isinstance(made[0], ShardwrightError):
            raise made[0]
        result: _T = made[0]
        return result


class _Current:
    context: Context | None = None


def context() -> Context:
    """The current run.

    Raises:
        UsageError: `init` was not called.
    """
    if _Current.context is None:
        raise UsageError(
            "shardwright is not initialised. Call shardwright.torch.init() first, once on every rank."
        )
    return _Current.context


def is_initialized() -> bool:
    """Whether `init` was called."""
    return _Current.context is not None


def set_context(value: Context | None) -> None:
    """Installs a run, or removes it."""
    _Current.context = value
