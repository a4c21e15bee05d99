"""Reports the cost of a step function that reads values midway."""

from collections.abc import Hashable, Sequence

import torch

from shardwright.comm.identity.purpose import Purpose
from shardwright.comm.trust.value_board import ValueBoard
from shardwright.quantities import format_seconds
from shardwright.torch.program.program import Program
from shardwright.torch.run.context import Context

__all__ = ["ReadCosts"]


class ReadCosts:
    """One line a step function, at the end of its first batch.

    Args:
        context: the run.
    """

    def __init__(self, context: Context):
        self._context = context
        self._told: set[Hashable] = set()

    def tell(self, function: Hashable, programs: Sequence[Program], board: ValueBoard) -> None:
        """Tells the user, if the batch that has ended was the first that reads; collective over the replica.

        Args:
            function: the step function.
            programs: of its microbatches.
            board: where the ranks have waited for what they read.
        """
        if function in self._told or not any(program.trace.ends for program in programs):
            return
        self._told.add(function)
        context = self._context
        assert context.links.replica is not None
        waited = torch.tensor(board.waited_s, dtype=torch.float64, device=context.device)
        longest_s = float(context.links.replica.gather(waited, Purpose.AGREEMENT).max())
        line = next((program.trace.end.read_at for program in programs if program.trace.end.read_at), "")
        if line and context.rank == 0:
            assert context.reporter is not None
            context.reporter.observer.status(
                f"{line}: the step function reads a value here. Every rank waits for it (up to "
                f"{format_seconds(longest_s)} in this step) and runs what follows by itself. A tensor that "
                "is returned, and read from the StepOutput, costs neither."
            )
