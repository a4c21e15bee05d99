"""Finds the memory that a call writes again when ``torch.utils.checkpoint`` repeats its forward.

The repeated forward runs up to the last operation that saves something for gradients. So a write under a
checkpoint is repeated if such an operation makes it, or follows it under the same checkpoint. A forward
without gradients, such as a teacher's, repeats nothing.
"""

from collections.abc import Iterable
from types import FrameType

import torch
from torch import Tensor

from shardwright.torch.pytorch.source_line import called_from, outermost_checkpoint

__all__ = ["RepeatedWrites"]


class RepeatedWrites:
    """Looks at the operations of one call of a unit.

    Attributes:
        again: memory (`storage_key`) that is written to a second time.
        once: memory that is written to without being repeated, or several times in between.
        undecided: when the call is over: memory that is written to a second time if another call under the
            same checkpoint has gradients.
    """

    def __init__(self) -> None:
        self.again: set[int] = set()
        self.once: set[int] = set()
        self.undecided: set[int] = set()
        self._undecided: list[tuple[FrameType, int]] = []

    def wrote(self, memories: Iterable[int]) -> None:
        """An operation is about to write to memory."""
        frame = outermost_checkpoint()
        # The variant that is `use_reentrant` runs without gradients at first.
        reentrant = called_from("torch.utils.checkpoint", "forward")
        for memory in memories:
            if reentrant:
                self._repeat(memory)
            elif frame is not None:
                self._undecided.append((frame, memory))
            else:
                self.once.add(memory)

    def ran(self, tensors: Iterable[Tensor]) -> None:
        """An operation with these arguments runs."""
        if not self._undecided or not torch.is_grad_enabled():
            return
        if any(tensor.requires_grad for tensor in tensors):
            frame = outermost_checkpoint()
            repeated = [memory for other, memory in self._undecided if other is frame]
            self._undecided = [(other, memory) for other, memory in self._undecided if other is not frame]
            for memory in repeated:
                self._repeat(memory)

    def forget(self) -> None:
        """Ends the call and releases its frames."""
        self.undecided = {memory for _, memory in self._undecided}
        self._undecided = []

    def _repeat(self, memory: int) -> None:
        if memory in self.again:
            self.once.add(memory)
        self.again.add(memory)
