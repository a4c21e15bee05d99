"""Exchanges a row of numbers per rank at the end of each training step.

::

    rank 0   │ busy, memory, loss, gradients, numbers of optimizers │ ──┐
    rank 1   │ busy, memory, loss, gradients, numbers of optimizers │ ──┼──► all rows on all ranks
    rank 2   │ ...                                                  │ ──┘

Where gradients are done with the microbatches, the rows have come with what ranks computed. All ranks see the
same rows, so they report, continue or stop alike, before any of them updates.
"""

import time
from collections.abc import Sequence
from enum import IntEnum

from torch import Tensor
from torch.optim import Optimizer

from shardwright.comm.message_names import Purpose
from shardwright.errors import ShardwrightError
from shardwright.observe.timeline import Row
from shardwright.run.context import Context
from shardwright.run.reporting import Reporter
from shardwright.torch.attention.marks import attention_table
from shardwright.torch.batch.batch import Batch
from shardwright.torch.batch.batch_result import BatchResult, Figures
from shardwright.torch.execution.trained_model import TrainedModel
from shardwright.torch.loss_scale import scale_of_losses
from shardwright.torch.step_end.finiteness import Finiteness
from shardwright.torch.step_end.group_numbers import GroupNumbers, row_of
from shardwright.torch.step_end.training_alike import OwnScaling, SameSamples, frozen_otherwise


class Column(IntEnum):
    """The columns of a rank's row; values that may be on a GPU come last.

    ``BUSY_S`` and ``PIPELINE_S`` are seconds of work, and from the first action to the last; ``MEMORY`` is in
    bytes. ``RECORDS`` of the first rank is 1 where the next step is to be recorded. ``TRAINED`` is a digest
    of which parameters are trained, ``SAMPLES`` one of the batch; ``WEIGHT`` is the sum of the weights of
    losses; ``SCALED`` is the script's factor on gradients; from ``NUMBERS`` on come digests of what
    optimizers have. ``LOSS`` and ``GRADIENTS`` are sums that are finite where everything in them is.
    """

    BUSY_S = 0
    PIPELINE_S = 1
    MEMORY = 2
    RECORDS = 3
    TRAINED = 4
    SAMPLES = 5
    WEIGHT = 6
    SCALED = 7
    NUMBERS = 8
    COMMON_NUMBERS = 9
    DEVICE_NUMBERS = 10
    COMMON_DEVICE_NUMBERS = 11
    LOSS = 12
    GRADIENTS = 13


class StepEnd:
    """The end of every training step of a model.

    Attributes:
        finiteness: whether the update is left out.
        numbers: what optimizers update with.
    """

    def __init__(self, context: Context, model: TrainedModel):
        self._context = context
        self._model = model
        self.finiteness = Finiteness(context, model)
        self.numbers = GroupNumbers(context)
        self._samples = SameSamples(context)
        self._scaling = OwnScaling(num_ranks=context.mesh.world_size, warns=context.rank == 0)

    def note(self, optimizer: Optimizer) -> bool:
        """An optimizer updates parameters of the model; returns whether it does so for the first time."""
        self._scaling.note()
        return self.numbers.note(optimizer)

    def come(self, run: BatchResult, batch: Batch, *, begun_s: float) -> float:
        """A training step has ended on this rank; collective over all ranks."""
        reporter = self._context.reporter
        assert isinstance(reporter, Reporter)
        seconds = time.perf_counter() - begun_s
        rows = self._rows(run, batch)
        columns = list(zip(*rows, strict=True))
        step = reporter.num_steps + 1
        if step == 1:
            reporter.attention_known(attention_table(self._model.get_module()))
        problem: ShardwrightError | None = frozen_otherwise(
            self._context, self._model.get_module(), columns[Column.TRAINED], step=step
        )
        problem = problem or self.finiteness.judge(columns[Column.LOSS :], run.losses or (), step=step)
        numbers = [each[Column.NUMBERS : Column.LOSS] for each in rows]
        problem = problem or self.numbers.judge(numbers, step=step)
        same = self._samples.look(columns[Column.SAMPLES], step=step)
        problem = problem or same
        self._scaling.look(columns[Column.SCALED])
        reporter.step_done(
            run,
            rows,
            seconds=seconds,
            loss=None if run.loss is None else run.loss / scale_of_losses(),
            skipped=self.finiteness.num_skipped,
        )
        if problem is not None:
            raise problem
        self._scaling.end(self._model.get_module().parameters())
        total: float = sum(columns[Column.WEIGHT])
        return total / len(rows)

    def figures_of(self, batch: Batch) -> Figures:
        """Gives the row of this rank, but for the losses, as soon as gradients are done."""

        def of(row: Row | None) -> list[float]:
            if row is None:
                return [0.0] * len(Column)
            figures: list[float] = row_of(self._told(row, batch), self._context.device).tolist()
            return figures

        return of

    def _told(self, row: Row, batch: Batch) -> list[float | Tensor]:
        """By columns; the weight and the losses come later."""
        reporter = self._context.reporter
        assert isinstance(reporter, Reporter)
        return [
            *reporter.figures_of(row),
            *(self._model.replicas.digest_of_trained, self._samples.digest(batch), 1.0),
            *(self._scaling.factor, *self.numbers.digests(), 0.0, self.finiteness.of_gradients()),
        ]

    def _rows(self, run: BatchResult, batch: Batch) -> Sequence[Sequence[float]]:
        """Those of all ranks."""
        weight = 1.0 if run.weights is None else run.weights.total
        loss = self.finiteness.of_losses(run)
        if run.figures is not None:  # of one replica, whose ranks have the same losses
            for figures in run.figures:
                figures[Column.WEIGHT], figures[Column.LOSS] = weight, float(loss)
            return run.figures
        told = self._told(run.row, batch)
        told[Column.WEIGHT], told[Column.LOSS] = weight, loss
        row, world = row_of(told, self._context.device), self._context.links.world
        # On a GPU this is where the host waits for the step.
        gathered = row[None] if world is None else world.gather(row, Purpose.FIGURES)
        rows: list[list[float]] = gathered.tolist()
        return rows
