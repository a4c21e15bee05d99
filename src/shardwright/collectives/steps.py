"""The steps of a rank in a collective, the memory that they need, and the topology of its group.

A row of steps is pure data: the communication thread runs it (`shardwright.comm`), `replay` proves that the
rows of all ranks fit together, and `price` adds up their costs.

::

    INPUT   what the caller gives           each rank its own
    OUTPUT  what the caller gets            each rank its own
    SCRATCH sums that are on their way      each rank its own
    SHARED  seen by all ranks of a node     one a node

Messages between two ranks keep their order. Ranks of a node signal their progress to one another: `Tell`
counts up this rank's signals, `Hear` waits until another rank's count is high enough.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from shardwright.errors import UsageError


@dataclass(frozen=True)
class Topology:
    """The ranks of a group, node by node.

    Ranks are those of the group: 0 to `num_ranks` - 1. A node is a set of ranks that share memory; there may
    be one rank alone on it, and nodes need not be of one size.

    Attributes:
        nodes: ascending ranks of each node; the nodes are in the order of their first ranks.

    >>> Topology.from_hosts(["a", "a", "b", "b", "b"])
    Topology(nodes=((0, 1), (2, 3, 4)))
    """

    nodes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        nodes = tuple(sorted(tuple(sorted(node)) for node in self.nodes if node))
        object.__setattr__(self, "nodes", nodes)
        found = sorted(rank for node in nodes for rank in node)
        if found != list(range(len(found))):
            raise UsageError(
                f"the nodes {nodes} hold the ranks {found}, but a group of {len(found)} has each of the "
                f"ranks 0 to {len(found) - 1} once."
            )

    @classmethod
    def from_hosts(cls, hosts: Sequence[str]) -> "Topology":
        """The topology of ranks that each report their host."""
        nodes: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            nodes.setdefault(host, []).append(rank)
        return cls(tuple(map(tuple, nodes.values())))

    @property
    def num_ranks(self) -> int:
        return len(self.node_of)

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        by_rank = {rank: number for number, node in enumerate(self.nodes) for rank in node}
        return tuple(by_rank[rank] for rank in range(len(by_rank)))

    def flat(self) -> "Topology":
        """The same ranks without shared memory."""
        return Topology(tuple((rank,) for rank in range(self.num_ranks)))

    def local(self, rank: int) -> tuple[int, ...]:
        """The ranks on the node of one of them, itself included."""
        return self.nodes[self.node_of[rank]]

    def __str__(self) -> str:
        """How many ranks there are on how many nodes.

        >>> print(Topology.from_hosts("aabb"), "|", Topology.from_hosts("aab"), "|", Topology.from_hosts("a"))
        2 nodes x 2 ranks | 2 nodes of 2, 1 ranks | 1 node x 1 rank
        """
        sizes = [len(node) for node in self.nodes]
        noun = "node" if len(sizes) == 1 else "nodes"
        if len(set(sizes)) == 1:
            return f"{len(sizes)} {noun} x {sizes[0]} {'rank' if sizes[0] == 1 else 'ranks'}"
        return f"{len(sizes)} {noun} of {', '.join(map(str, sizes))} ranks"


class Memory(Enum):
    """Where elements are."""

    INPUT = "input"
    OUTPUT = "output"
    SCRATCH = "scratch"
    SHARED = "shared"


class Span(NamedTuple):
    """Consecutive elements."""

    memory: Memory
    start: int
    stop: int

    @property
    def num_elements(self) -> int:
        return self.stop - self.start


class Copy(NamedTuple):
    source: Span
    target: Span


class Combine(NamedTuple):
    """Reduces elements of several places to one, in this order; the target may be one of them."""

    sources: tuple[Span, ...]
    target: Span


class Send(NamedTuple):
    """Starts to send elements to a rank of another node; they stay as they are until they have left."""

    peer: int
    span: Span


class Receive(NamedTuple):
    """Receives data from a rank of another node; nobody reads it before it has arrived."""

    peer: int
    span: Span


class Left(NamedTuple):
    """Waits until the first messages to a rank, so many, have left."""

    peer: int
    number: int


class Arrived(NamedTuple):
    """Waits until the first messages from a rank, so many, have arrived."""

    peer: int
    number: int


class Tell(NamedTuple):
    """Tells the other ranks of the node that all steps before this one are done."""


class Hear(NamedTuple):
    """Waits until a rank of the node has told for the n-th time."""

    peer: int
    number: int


Step = Copy | Combine | Send | Receive | Left | Arrived | Tell | Hear


class Row:
    """The steps of one rank, as they are written down.

    Empty copies and messages are left out. The ranks of a node tell one another the same things in the same
    order, so that each knows how often the others have told when they tell something.

    Attributes:
        steps: in the order in which they are done.
    """

    def __init__(self, rank: int, here: Sequence[int]):
        self.rank = rank
        self.steps: list[Step] = []
        self._peers = tuple(peer for peer in here if peer != rank)
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._told: dict[tuple[str, int], int] = {}

    def copy(self, source: Span, target: Span) -> None:
        """Copies elements, unless there are none or they are there already."""
        if source.num_elements and source != target:
            self.steps.append(Copy(source, target))

    def combine(self, sources: Sequence[Span], target: Span) -> None:
        """Reduces elements; those of one place alone are copied."""
        if len(sources) == 1:
            self.copy(sources[0], target)
        elif target.num_elements:
            self.steps.append(Combine(tuple(sources), target))

    def send(self, peer: int, span: Span) -> Left:
        """Sends elements; returns the step that waits until they have left."""
        if span.num_elements:
            self._sent[peer] += 1
            self.steps.append(Send(peer, span))
        return Left(peer, self._sent[peer])

    def receive(self, peer: int, span: Span) -> Arrived:
        """Takes elements; returns the step that waits until they have arrived."""
        if span.num_elements:
            self._received[peer] += 1
            self.steps.append(Receive(peer, span))
        return Arrived(peer, self._received[peer])

    def wait(self, messages: Iterable[Left | Arrived]) -> None:
        """Waits for messages that were begun before."""
        self.steps.extend(message for message in messages if message.number)

    def tell(self, what: str, chunk: int) -> None:
        """Tells the node that this rank has done something with a chunk."""
        if self._peers:
            self._told[what, chunk] = len(self._told) + 1
            self.steps.append(Tell())

    def hear(self, what: str, chunk: int, peers: Sequence[int] | None = None) -> None:
        """Waits until ranks of the node, by default all others, have reached this rank's count of signals."""
        for peer in self._peers if peers is None else peers:
            if peer != self.rank:
                self.steps.append(Hear(peer, self._told[what, chunk]))


@dataclass(frozen=True, slots=True)
class Routine:
    """The steps of one rank in a collective.

    Attributes:
        num_shared: elements of the memory of its node that it uses.
        tells: it tells the ranks of its node how far it is.
    """

    steps: tuple[Step, ...]
    num_shared: int
    num_scratch: int
    tells: bool

    @classmethod
    def of(cls, steps: Iterable[Step]) -> "Routine":
        """The routine that has these steps."""
        steps = tuple(steps)
        needed = {Memory.SHARED: 0, Memory.SCRATCH: 0}
        for step in steps:
            for span in _spans(step):
                if span.memory in needed:
                    needed[span.memory] = max(needed[span.memory], span.stop)
        tells = any(isinstance(step, Tell) for step in steps)
        return cls(steps, needed[Memory.SHARED], needed[Memory.SCRATCH], tells)


def _spans(step: Step) -> Iterator[Span]:
    match step:
        case Copy(source, target):
            yield from (source, target)
        case Combine(sources, target):
            yield from (*sources, target)
        case Send(_, span) | Receive(_, span):
            yield span
