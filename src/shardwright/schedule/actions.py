"""The actions of a pipeline rank.

An *action* is a stage's forward for one microbatch, its backward, one end of a transfer, or a copy to or from
host memory. The text form is PyTorch's: stage, kind, microbatch.
"""

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["COMPUTE", "HOST_COPIES", "TRANSFERS", "Action", "Kind"]


class Kind(StrEnum):
    """Kinds of actions.

    A whole backward ``B`` computes the gradients of a stage's inputs and of its weights. Split in two, ``I``
    computes those of the inputs, for which the stage before waits, and ``W`` those of the weights, for which
    nobody waits.

    ``OFFLOAD`` copies what a forward has kept for its backward to the memory of the host, and ``LOAD`` copies
    it back. Both start where they stand in the row, and run beside what comes next.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    OFFLOAD = "OFFLOAD"
    LOAD = "LOAD"


COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
"""Kinds that occupy the device."""

TRANSFERS = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)
"""Kinds that move a tensor between two ranks."""

HOST_COPIES = (Kind.OFFLOAD, Kind.LOAD)
"""Kinds that move what a stage keeps to the memory of the host and back."""


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work of one stage for one microbatch.

    Attributes:
        kind: what is done.
        stage: the stage that does it; for a transfer, the stage that sends or receives.
        microbatch: which microbatch, from 0.
        peer: the other stage of a transfer; None for all else.

    >>> str(Action(Kind.FORWARD, 2, 3)), str(Action(Kind.SEND_F, 1, 0, peer=2))
    ('2F3', '1SEND_F0')
    """

    kind: Kind
    stage: int
    microbatch: int
    peer: int | None = None

    @property
    def is_compute(self) -> bool:
        """Whether it occupies the device."""
        return self.kind in COMPUTE

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"
