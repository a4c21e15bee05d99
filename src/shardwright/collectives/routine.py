"""The steps of one rank, and the memory that they need."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardwright.collectives.steps import Combine, Copy, Memory, Receive, Send, Span, Step, Tell

__all__ = ["Routine"]


@dataclass(frozen=True, slots=True)
class Routine:
    """The steps of one rank in a collective.

    Attributes:
        num_shared: elements of the memory of its node that it uses.
        num_scratch: elements of its own scratch memory.
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
