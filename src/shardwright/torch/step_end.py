"""What ranks tell each other when a training step has ended: a row of numbers each, in one exchange.

::

    rank 0   │ busy, memory, loss, gradients, numbers of optimizers │ ──┐
    rank 1   │ busy, memory, loss, gradients, numbers of optimizers │ ──┼──► all rows on all ranks
    rank 2   │ ...                                                  │ ──┘

All ranks see the same rows, so that they report, go on or end alike, before any of them makes an update.
"""

import sys
import time
from enum import IntEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwright.comm.devices_in_use import uses_gpus
from shardwright.comm.purpose import Purpose
from shardwright.torch.context import Context
from shardwright.torch.engine_run import EngineRun
from shardwright.torch.finiteness import Finiteness

if TYPE_CHECKING:
    from shardwright.torch.model import DistributedModel

__all__ = ["Column", "StepEnd"]


class Column(IntEnum):
    """Of a rank's row; what may be on a GPU comes last.

    ``BUSY_S`` and ``PIPELINE_S`` are seconds of work, and from the first action to the last; ``MEMORY`` is in
    bytes. ``LOSS`` and ``GRADIENTS`` are sums that are finite where everything in them is.
    """

    BUSY_S = 0
    PIPELINE_S = 1
    MEMORY = 2
    LOSS = 3
    GRADIENTS = 4


class StepEnd:
    """The end of every training step of a model.

    Args:
        context: the run.
        model: the wrapped model.

    Attributes:
        finiteness: whether the update is left out.
    """

    def __init__(self, context: Context, model: "DistributedModel"):
        self._context = context
        self.finiteness = Finiteness(context, model)

    def come(self, run: EngineRun, *, begun_s: float) -> None:
        """A training step has ended on this rank; collective over all ranks.

        Args:
            run: the step.
            begun_s: when it began, on `time.perf_counter`.

        Raises:
            NonFiniteError: a loss or a gradient is not finite, and the run is to stop then.
        """
        reporter = self._context.reporter
        assert reporter is not None
        looked = self.finiteness.look(run.losses or ())
        seconds = time.perf_counter() - begun_s
        rows = self._exchanged(run, looked)
        step = reporter.num_steps + 1
        problem = self.finiteness.judge(rows[:, [Column.LOSS, Column.GRADIENTS]], run.losses or (), step=step)
        busy_s, pipeline_s, memory = rows[:, : Column.LOSS].unbind(1)
        reporter.step_done(
            run,
            seconds=seconds,
            busy_s=busy_s.tolist(),
            pipeline_s=pipeline_s.tolist(),
            memory=[int(num_bytes) for num_bytes in memory.tolist()],
            skipped=self.finiteness.num_skipped,
        )
        if problem is not None:
            raise problem

    def _exchanged(self, run: EngineRun, on_device: tuple[Tensor, ...]) -> Tensor:
        """The rows of all ranks: (ranks, columns). On a GPU this is where the host waits for the step."""
        device, world = self._context.device, self._context.world
        busy_s = sum(end - start - waited for _, start, end, waited in run.row)
        here = torch.tensor([busy_s, run.pipeline_s, _memory()], dtype=torch.float64, device=device)
        row = torch.cat([here, torch.stack(on_device)])
        return row[None].cpu() if world is None else world.gather(row, Purpose.FIGURES).cpu()


def _memory() -> int:
    """Peak memory of this process: of the GPU where there is one, else the resident set."""
    if uses_gpus():
        return torch.cuda.max_memory_allocated()
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
