"""The state of a run: settings, ranks, process groups, ties to other ranks, the wrapped model."""

import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from shardwright.cluster import Cluster
from shardwright.comm.blame import Blame
from shardwright.comm.codec import declare
from shardwright.comm.joining.process_group import default_store, group_of, tell_all, tell_from
from shardwright.comm.joining.store import ValueBoard
from shardwright.comm.local_peers import LocalPeers
from shardwright.comm.message_names import Purpose
from shardwright.comm.pulse import PageAddress, Pulse
from shardwright.comm.roll_call import RollCall
from shardwright.comm.transport import SmallCollectives, Transport
from shardwright.comm.whereabouts import Whereabouts
from shardwright.config import Config
from shardwright.errors import ShardwrightError, UsageError
from shardwright.mesh import Axes, Mesh
from shardwright.observe import Observer, Phase, RunFolder
from shardwright.plan import Plan


@dataclass(slots=True)
class ProcessGroups:
    """The process groups that this rank is in; None for a group of one rank.

    Attributes:
        pipeline: those of them with its other stages, at the same place along the tensor axis.
        tensor: ranks that share a batch, and work on it together.
        inner: where they share it in two ways (`Mesh.inner`), those of them that share one part; else None.
        outer: likewise those of them that have other parts, at the same place in their inner groups.
        data: ranks that hold the same part of the model, one in each replica.
        shard: those of them that share its parameters.
        replica: those of them that have the same part of its parameters.
        updating: those of `data`, or of `replica`, that share the optimizer's state.
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
    updating: dist.ProcessGroup | None = None
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


_NO_PORT = 1


class Host(NamedTuple):
    """The host of a rank.

    Attributes:
        address: from which the rank reaches the host that serves the store.
    """

    name: str
    address: str
    page: PageAddress

    def refuses(self, timeout_s: float) -> bool:
        """Whether it answers a knock at a port where nobody listens."""
        with suppress(ConnectionError):  # it has answered
            socket.create_connection((self.address, _NO_PORT), timeout=timeout_s).close()
        return True


@dataclass(slots=True)
class RankWatch:
    """The watch over ranks that fail, or do not come; None for a single rank.

    Attributes:
        whereabouts: tells the others where this rank is in its script.
        roll_call: waits for ranks that are to make a call together.
        pulse: tells the other ranks of this host that this one lives.
        hosts_answer: knocks at another host's closed port were answered at the start: if they are not
            later, it cannot be reached.
    """

    blame: Blame | None = None
    whereabouts: Whereabouts | None = None
    roll_call: RollCall | None = None
    pulse: Pulse | None = None
    hosts: tuple[Host, ...] = ()
    hosts_answer: bool = False


declare(Plan)

_T = TypeVar("_T")


class Reports(Protocol):
    """Reports to the observer: see `Reporter`."""

    num_steps: int
    calls_steps: bool

    @property
    def observer(self) -> Observer:
        """Writes it down."""

    @property
    def folder(self) -> RunFolder | None:
        """Of the run; None where nothing is written."""

    @property
    def draws_next_step(self) -> bool:
        """Whether the timeline of the next step will be asked for."""

    def phase(self, text: str) -> AbstractContextManager[Phase]:
        """Around a part of the first step that takes long."""

    def plan_made(self, plan: Plan) -> None:
        """The plan is in force; collective."""

    def close(self) -> None:
        """The run is over."""


@dataclass(slots=True)
class Context:
    """Everything that belongs to one run.

    Attributes:
        watch: over ranks that fail, or do not come.
        plan: the plan in force; None until the first step, unless one was given.
        cluster: the present machines, once they were measured.
        model: of the script, wrapped by its front end; None before that.
        optimizers: those of the script that the front end has wrapped.
    """

    config: Config
    mesh: Mesh
    rank: int
    local_rank: int
    local_size: int
    device: torch.device
    groups: ProcessGroups = field(default_factory=ProcessGroups)
    links: Links = field(default_factory=Links)
    watch: RankWatch = field(default_factory=RankWatch)
    plan: Plan | None = None
    cluster: Cluster | None = None
    reporter: Reports | None = None
    model: Any = None
    optimizers: list[Any] = field(default_factory=list)
    cleanup: ExitStack = field(default_factory=ExitStack)

    @property
    def pipeline_rank(self) -> int:
        """Position in the pipeline, from 0."""
        return self.mesh.group_rank("pp", self.rank)

    @property
    def data_rank(self) -> int:
        """The number of this replica, from 0."""
        return self.mesh.group_rank("rdp", self.rank)

    @property
    def tensor_rank(self) -> int:
        """Position among the ranks that share a batch, from 0."""
        return self.mesh.group_rank("share", self.rank)

    @property
    def part_rank(self) -> int:
        """Position among the ranks with other parts of this stage's parameters, from 0."""
        return self.mesh.group_rank(self._with_parts, self.rank)

    @property
    def num_parts(self) -> int:
        """Ranks that have different parts of this stage's parameters: of its layers, or the experts."""
        return self.mesh.parts

    @property
    def _with_parts(self) -> Axes:
        return "share" if self.mesh.expert > 1 else "tp"

    def copy_of(self, num_parts: int) -> tuple[int, int]:
        """Which copy this rank has of its part of a parameter, from 0."""
        num_copies = self.mesh.share // num_parts
        axes: Axes = "share" if num_parts == 1 else self.mesh.outer
        return (0 if num_copies == 1 else self.mesh.group_rank(axes, self.rank)), num_copies

    @property
    def is_first_holder(self) -> bool:
        """Whether this rank stands for all with the same stages: replicas, and ranks that share layers."""
        return self.data_rank == 0 and self.tensor_rank == 0

    @property
    def pipeline_ranks(self) -> tuple[int, ...]:
        """World ranks with this replica's stages, by pipeline rank; at this place along the tensor axis."""
        return self.mesh.group("pp", self.rank)

    @property
    def replica_ranks(self) -> tuple[int, ...]:
        """World ranks that share this replica."""
        return self.mesh.group("mp", self.rank)

    @property
    def holders(self) -> tuple[int, ...]:
        """World ranks that hold the same part of the model, one in each replica."""
        return self.mesh.group("rdp", self.rank)

    def group_of_replicas(self) -> dist.ProcessGroup | None:
        """One rank of each replica, this one of its own; None for a single rank."""
        if self.mesh.world_size == 1:
            return None
        if self.mesh.data > 1:
            return self.groups.data
        if self.groups.alone is None:
            timeout = timedelta(seconds=self.config.timeout_s)
            self.groups.alone = dist.new_group([self.rank], timeout=timeout, use_local_synchronization=True)
        return self.groups.alone

    def further_group(
        self, axes: Axes, *, use: str, backend: str | None = None, size: int | None = None
    ) -> dist.ProcessGroup:
        """A group of its own for a use: of all ranks along these axes, or of so many neighbours.

        Collective over all ranks, which make all groups along these axes in the same order.
        """
        timeout_s = self.config.timeout_s
        step = size or self.mesh.group_size(axes)
        made = {
            ranks: group_of(ranks, use=use, timeout_s=timeout_s, backend=backend)
            for along in self.mesh.groups(axes)
            for ranks in (along[at : at + step] for at in range(0, len(along), step))
        }
        return next(group for ranks, group in made.items() if self.rank in ranks)

    def from_all_ranks(self, fact: _T) -> list[_T]:
        """Tells all ranks a fact, of kinds that `codec` takes; collective over them."""
        if self.mesh.world_size == 1:
            return [fact]
        world, whereabouts = self.links.world, self.watch.whereabouts
        if world is None or not world.on_one_host:
            return tell_all(fact)
        # Of gloo's collectives others see which ranks they wait for.
        ranks, where = range(self.mesh.world_size), str(Purpose.FACTS)
        with nullcontext() if whereabouts is None else whereabouts.inside(where, ranks):
            return tell_all(fact, gather=lambda message: world.gather(message, Purpose.FACTS))

    def from_first_rank(self, make: Callable[[], _T]) -> _T:
        """Broadcasts the first rank's result, of kinds that `codec` takes; collective over all ranks.

        The ranks fail together.
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
    """The current run."""
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


def replica_board(context: Context, number: int) -> ValueBoard:
    """The board of this rank's replica, at this rank's place along the tensor axis."""

    def has_ended(rank: int) -> bool:
        local = context.links.local_peers
        if local is not None and rank in local and local.has_ended(rank):
            return True
        return context.watch.blame is not None and context.watch.blame.has_failed(rank)

    store: Any = default_store()  # whose type, as PyTorch declares it, lacks clone()
    name = f"values of replica {context.data_rank}, part {context.tensor_rank}, in run {number}"
    store = PrefixStore(name, store.clone())  # who waits at one keeps others from it
    board = ValueBoard(
        store,
        context.pipeline_ranks,
        rank=context.pipeline_rank,
        has_ended=has_ended,
        timeout_s=context.config.timeout_s,
    )
    assert context.watch.whereabouts is not None
    context.watch.whereabouts.also_tell.append(board.tell)
    return board
