"""The steps of a rank in a collective.

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
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

__all__ = [
    "Arrived",
    "Combine",
    "Copy",
    "Hear",
    "Left",
    "Memory",
    "Receive",
    "Row",
    "Send",
    "Span",
    "Step",
    "Tell",
]


class Memory(Enum):
    """Where elements are."""

    INPUT = "input"
    OUTPUT = "output"
    SCRATCH = "scratch"
    SHARED = "shared"


class Span(NamedTuple):
    """Consecutive elements.

    Attributes:
        stop: behind the last of them.
    """

    memory: Memory
    start: int
    stop: int

    @property
    def num_elements(self) -> int:
        """How many there are."""
        return self.stop - self.start


class Copy(NamedTuple):
    """Copies elements."""

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
