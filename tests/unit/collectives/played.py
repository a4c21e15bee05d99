"""Replays the rows of all ranks, and proves that they fit together.

Rows fit if they all finish although a message moves only once it is both sent and expected, and if no two
ranks, or a rank and a message, use the same elements at the same time. The order of events follows from the
rows alone::

    rank 0   Copy to SHARED ── Tell ─┐
    rank 1                           └─ Hear ── Copy from SHARED       ordered: no race
    rank 2               Copy from SHARED                             may happen at any time: a race
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.collectives.steps import (
    Arrived,
    Combine,
    Copy,
    Hear,
    Left,
    Memory,
    Receive,
    Send,
    Span,
    Step,
    Tell,
    Topology,
)
from shardwright.errors import ScheduleError

RankMemory = tuple[Memory, int]
"""A memory, and the rank whose it is; of shared memory, the first rank of the node."""

Label = tuple[object, ...]
"""What an element is the sum of, in the order in which it was summed."""


@dataclass(slots=True)
class _Message:
    """A message on its way.

    Attributes:
        sent: events before its elements are read, as bits; None until it is sent.
        expected: events before its elements are written; None until it is expected.
    """

    source: Span | None = None
    target: Span | None = None
    sent: int | None = None
    expected: int | None = None
    left: int = 0
    arrived: int | None = None


@dataclass(slots=True)
class _Access:
    event: int
    before: int
    span: Span
    writes: bool
    what: str


@dataclass(slots=True)
class ReplayOutcome:
    """The outcome of a replay.

    Attributes:
        elements: of each memory, by index: what each element is the sum of.
        between_nodes: elements that each rank sent to ranks of other nodes.
    """

    elements: dict[RankMemory, dict[int, Label]] = field(default_factory=lambda: defaultdict(dict))
    between_nodes: list[int] = field(default_factory=list)


def replay(
    topology: Topology, rows: Sequence[Sequence[Step]], inputs: Sequence[Sequence[Label]]
) -> ReplayOutcome:
    """Plays rows to their ends."""
    play = _Play(topology, rows)
    for rank, labels in enumerate(inputs):
        play.result.elements[Memory.INPUT, rank] = dict(enumerate(labels))
    play.run()
    play.refuse_races()
    return play.result


class _Play:
    def __init__(self, topology: Topology, rows: Sequence[Sequence[Step]]):
        self._topology = topology
        self._rows = rows
        self._position = [0] * len(rows)
        self._before = [0] * len(rows)  # events before the next step of a rank, as bits
        self._num_events = 0
        self._told: list[list[int]] = [[] for _ in rows]
        self._messages: dict[tuple[int, int], list[_Message]] = defaultdict(list)
        self._sent: dict[tuple[int, int], int] = defaultdict(int)
        self._expected: dict[tuple[int, int], int] = defaultdict(int)
        self._accesses: dict[RankMemory, list[_Access]] = defaultdict(list)
        self.result = ReplayOutcome(between_nodes=[0] * len(rows))

    def run(self) -> None:
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(self._rows):
                while self._position[rank] < len(row) and self._do(rank, row[self._position[rank]]):
                    self._position[rank] += 1
                    moved = True
        stuck = [
            f"rank {rank} at step {position}, {row[position]}"
            for rank, (position, row) in enumerate(zip(self._position, self._rows, strict=True))
            if position < len(row)
        ]
        if stuck:
            raise ScheduleError(f"the ranks wait for one another for ever: {'; '.join(stuck)}.")
        for (source, target), messages in self._messages.items():
            if any(message.arrived is None for message in messages):
                raise ScheduleError(f"a message from rank {source} to rank {target} is sent or taken alone.")

    def refuse_races(self) -> None:
        for place, accesses in self._accesses.items():
            for number, later in enumerate(accesses):
                for earlier in accesses[:number]:
                    if not (earlier.writes or later.writes):
                        continue
                    if max(earlier.span.start, later.span.start) >= min(earlier.span.stop, later.span.stop):
                        continue
                    if later.before >> earlier.event & 1 or earlier.before >> later.event & 1:
                        continue
                    memory, owner = place
                    raise ScheduleError(
                        f"{earlier.what} and {later.what} use the same elements of the {memory.value} memory "
                        f"of rank {owner} at the same time."
                    )

    def _do(self, rank: int, step: Step) -> bool:
        """Does a step, unless it has to wait."""
        match step:
            case Copy(source, target):
                labels = self._read(rank, source)
                self._event(rank, [source], target, step)
                self._write(rank, target, labels)
            case Combine(sources, target):
                parts = [self._read(rank, source) for source in sources]
                self._event(rank, sources, target, step)
                self._write(rank, target, [sum(labels, ()) for labels in zip(*parts, strict=True)])
            case Send(peer, span):
                message = self._message(rank, peer, self._sent)
                message.source, message.sent = span, self._before[rank]
                message.left = self._access(message.sent, [(rank, span, False)], f"a message to rank {peer}")
                self.result.between_nodes[rank] += span.num_elements
                self._move(rank, peer, message)
            case Receive(peer, span):
                message = self._message(peer, rank, self._expected, source=peer, target=rank)
                message.target, message.expected = span, self._before[rank]
                self._move(peer, rank, message)
            case Left(peer, count):
                message = self._messages[rank, peer][count - 1]
                if message.expected is None:
                    return False
                self._before[rank] |= message.left
            case Arrived(peer, count):
                messages = self._messages[peer, rank]
                arrived = messages[count - 1].arrived
                if arrived is None:
                    return False
                self._before[rank] |= arrived
            case Tell():
                self._told[rank].append(self._before[rank])
            case Hear(peer, count):
                if len(self._told[peer]) < count:
                    return False
                self._before[rank] |= self._told[peer][count - 1]
        return True

    def _message(
        self,
        rank: int,
        peer: int,
        counts: dict[tuple[int, int], int],
        *,
        source: int | None = None,
        target: int | None = None,
    ) -> _Message:
        way = (rank, peer) if source is None or target is None else (source, target)
        messages = self._messages[way]
        number = counts[way]
        counts[way] += 1
        while len(messages) <= number:
            messages.append(_Message())
        return messages[number]

    def _move(self, source: int, target: int, message: _Message) -> None:
        """Moves the elements of a message that is both sent and expected."""
        if message.source is None or message.target is None:
            return
        if message.source.num_elements != message.target.num_elements:
            raise ScheduleError(
                f"rank {source} sends {message.source} where rank {target} takes {message.target}."
            )
        assert message.expected is not None
        message.arrived = self._access(
            message.left | message.expected, [(target, message.target, True)], f"a message from rank {source}"
        )
        self._write(target, message.target, self._read(source, message.source))

    def _event(self, rank: int, sources: Sequence[Span], target: Span, step: Step) -> None:
        spans = [(rank, span, False) for span in sources] + [(rank, target, True)]
        self._before[rank] = self._access(self._before[rank], spans, f"{step} of rank {rank}")

    def _access(self, before: int, spans: Sequence[tuple[int, Span, bool]], what: str) -> int:
        """Notes an event that uses elements; returns it, and all before it, as bits."""
        event = self._num_events
        self._num_events += 1
        for rank, span, writes in spans:
            access = _Access(event, before | 1 << event, span, writes, what)
            self._accesses[self._place(rank, span.memory)].append(access)
        return before | 1 << event

    def _place(self, rank: int, memory: Memory) -> RankMemory:
        return memory, (self._topology.local(rank)[0] if memory is Memory.SHARED else rank)

    def _read(self, rank: int, span: Span) -> list[Label]:
        elements = self.result.elements[self._place(rank, span.memory)]
        missing = [index for index in range(span.start, span.stop) if index not in elements]
        if missing:
            raise ScheduleError(f"rank {rank} reads {span}, whose element {missing[0]} nobody has written.")
        return [elements[index] for index in range(span.start, span.stop)]

    def _write(self, rank: int, span: Span, labels: Sequence[Label]) -> None:
        if len(labels) != span.num_elements:
            raise ScheduleError(f"rank {rank} writes {len(labels)} elements to {span}.")
        elements = self.result.elements[self._place(rank, span.memory)]
        elements.update(zip(range(span.start, span.stop), labels, strict=True))
