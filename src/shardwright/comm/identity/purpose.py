"""The purpose of a message."""

from enum import IntEnum

__all__ = ["Purpose"]


class Purpose(IntEnum):
    """Goes with every message between ranks of one host, so that ranks at different places notice it.

    >>> print(Purpose.BATCH)
    the batch of a step
    """

    PIPELINE = 0
    BATCH = 1
    OUTPUTS = 2
    AGREEMENT = 3
    FIGURES = 4
    NORM = 5
    MEETING = 6
    CHECKPOINT = 7
    UPDATE = 8

    def __str__(self) -> str:
        return _TEXTS[self]


_TEXTS = {
    Purpose.PIPELINE: "a tensor between stages",
    Purpose.BATCH: "the batch of a step",
    Purpose.OUTPUTS: "the outputs of a step",
    Purpose.AGREEMENT: "what ranks agree on in a step",
    Purpose.FIGURES: "the figures of a step",
    Purpose.NORM: "a norm of gradients",
    Purpose.CHECKPOINT: "whether a checkpoint is due (step_done, save or wait of sw.Checkpoints)",
    Purpose.UPDATE: "a number that an optimizer takes over all stages (step of DistributedOptimizer)",
    Purpose.MEETING: "a call on all ranks, such as model.state_dict() or sw.barrier()",
}
