"""Exchanges a row of numbers per rank at the end of each training step, and checks loss and gradients.

The check is one norm of all gradients of a rank, which is finite if all of them are. It travels in the row
that ranks exchange at the end of every step. Only if it is not finite do ranks look closer, and name the
parameter.

::

    gradients of a rank ── norm ──► row of the step's end ──► all ranks ── finite ──► update
                                                                  └── not ──► which? ──► stop, or skip

::

    rank 0   │ busy, memory, loss, gradients, numbers of optimizers │ ──┐
    rank 1   │ busy, memory, loss, gradients, numbers of optimizers │ ──┼──► all rows on all ranks
    rank 2   │ ...                                                  │ ──┘

Where gradients are done with the microbatches, the rows have come with what ranks computed. All ranks see the
same rows, so they report, continue or stop alike, before any of them updates.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import accumulate

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwright.comm.joining.process_group import tell_all
from shardwright.comm.message_names import Purpose, listed
from shardwright.errors import NonFiniteError, ShardwrightError
from shardwright.observe.timeline import Row
from shardwright.run.context import Context
from shardwright.run.reporting import Reporter
from shardwright.torch._private.modules import norms_of
from shardwright.torch._private.tensors import values_of_sparse
from shardwright.torch.attention.hugging_face import attention_table
from shardwright.torch.batch.batch import Batch
from shardwright.torch.batch.step_output import BatchResult, Figures
from shardwright.torch.execution.agreement import TrainedModel
from shardwright.torch.loss_scale import losses_were_scaled, scale_of_losses
from shardwright.torch.parameters.sharded_tensor import own_part
from shardwright.torch.step_end.group_numbers import GroupNumbers, row_of
from shardwright.torch.step_end.training_alike import OwnScaling, SameSamples, SameStream, frozen_otherwise
from shardwright.torch.streams import FirstBatch
from shardwright.torch.tensor_parallel.divided_tensor import local_of

_MOST_IN_A_ROW = 20
_MOST_NAMES = 3
_MOST_FINDINGS = 4


class _Finiteness:
    """Whether the training steps of a model give finite numbers.

    With the library's loss scale, overflow is its business as long as the scale can fall; with a `GradScaler`
    of PyTorch, always: it leaves the update out by itself.

    Attributes:
        leaves_out: the gradients of the last step are not finite, and no optimizer is to use them.
        num_skipped: how many steps had such gradients.
    """

    def __init__(self, context: Context, model: TrainedModel):
        self._context = context
        self._model = model
        self._in_a_row = 0
        self.leaves_out = False
        self.num_skipped = 0

    def of_losses(self, run: BatchResult) -> float | Tensor:
        """The sum of the losses of this replica; on a GPU a tensor, for which nobody waits."""
        if not self._looks:
            return 0.0
        if self._context.device.type == "cpu":
            return sum(loss for loss in run.loss_values if loss is not None)
        numbers = [loss.double().mean() for loss in run.losses or () if loss is not None]
        return torch.stack(numbers).sum() if numbers else 0.0

    def of_gradients(self) -> float | Tensor:
        """The sum of the norms of the gradients of this rank; on a GPU a tensor, for which nobody waits."""
        norm = self._norm_of_gradients() if self._looks else 0.0
        return float(norm) if self._context.device.type == "cpu" else norm

    def judge(
        self, sums: Iterable[Sequence[float]], losses: Sequence[Tensor | None], *, step: int
    ) -> NonFiniteError | None:
        """Says what becomes of the update; collective over all ranks where something is not finite."""
        self.leaves_out = False
        found = self._scale_is_lowest or not all(math.isfinite(each) for row in sums for each in row)
        findings = self._told(losses) if found else ""
        if not findings:  # all is well, or the norm alone was too large for its type
            self._in_a_row = 0
            return None
        self.leaves_out = True  # also for a script that catches the error
        if self._context.config.on_nonfinite == "stop":
            return NonFiniteError(
                f"step {step}: {findings}. No rank has made the update: the weights are those from before. "
                "Lower the learning rate, clip gradients, or look for a division by zero or a logarithm of "
                "0: torch.autograd.set_detect_anomaly(True) names the operation. The setting on_nonfinite "
                "'skip' leaves such updates out."
            )
        self.num_skipped += 1
        self._in_a_row += 1
        self._say(step, findings)
        if self._in_a_row < _MOST_IN_A_ROW:
            return None
        return NonFiniteError(
            f"step {step}: {findings}. So it was in {self._in_a_row} steps one after the other, whose "
            "updates were left out (on_nonfinite is 'skip'): it will not get better. Resume from a "
            "checkpoint from before, with a lower learning rate."
        )

    @property
    def _looks(self) -> bool:
        if self._context.config.on_nonfinite == "ignore" or losses_were_scaled():
            return False
        return self._model.scaling is None

    @property
    def _scale_is_lowest(self) -> bool:
        """Whether gradients overflowed although the loss scale of the run cannot fall any more."""
        if self._model.scaling is None or self._context.config.on_nonfinite == "ignore":
            return False
        scaler = self._model.scaling.scaler
        return scaler.overflow and scaler.dynamic and scaler.scale <= scaler.min_scale

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's gradients, by the names of the parameters."""
        for name, parameter in self._model.get_module().named_parameters():
            if parameter.grad is not None:
                yield name, _values_here(parameter.grad)

    def _norm_of_gradients(self) -> Tensor | float:
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        gradients = [p.grad for p in self._model.tree.parameters]
        parts = [_values_here(gradient) for gradient in gradients if gradient is not None]
        if self._model.replicas.have_one_gradient and self._context.mesh.data > 1:
            parts = _share(parts, self._context.data_rank, self._context.mesh.data)
        for part in parts:
            kinds.setdefault((part.dtype, part.device), []).append(part)
        norms = [torch.stack(list(norms_of(parts))).sum().double() for parts in kinds.values()]
        return sum(norms[1:], start=norms[0]) if norms else 0.0

    # ---- where something is not finite ----

    def _told(self, losses: Sequence[Tensor | None]) -> str:
        """The findings of all ranks, the one next to the loss first; collective over all ranks."""
        world, mesh = self._context.links.world, self._context.mesh
        mine = f"{self._of_losses(losses)}\n{self._of_gradients()}"
        told = [mine] if world is None else tell_all(mine)
        of_losses, of_gradients = zip(*(text.split("\n") for text in told), strict=True)
        parts = [text for text in dict.fromkeys(of_losses) if text]
        ranks: dict[str, list[int]] = {}  # replicas have the same gradients
        for rank in sorted(range(len(told)), key=lambda rank: -mesh.group_rank("pp", rank)):
            if of_gradients[rank]:
                ranks.setdefault(of_gradients[rank], []).append(rank)
        parts += [f"gradients on {_ranks(r)} {text}" for text, r in ranks.items()]
        more = f", and so on ({len(parts)} findings)" if len(parts) > _MOST_FINDINGS else ""
        return "; ".join(parts[:_MOST_FINDINGS]) + more

    def _of_losses(self, losses: Sequence[Tensor | None]) -> str:
        numbers = [None if loss is None else float(loss.double().sum()) for loss in losses]
        bad = [i for i, n in enumerate(numbers) if n is not None and not abs(n) < float("inf")]
        if not bad:
            return ""
        where = ", ".join(map(str, bad))
        replica = f" of replica {self._context.data_rank}" if self._context.mesh.data > 1 else ""
        return (
            f"the loss is {numbers[bad[0]]} in microbatch{'es' * (len(bad) > 1)} {where}{replica} "
            f"({_ranks(self._context.pipeline_ranks)})"
        )

    @torch.no_grad()
    def _of_gradients(self) -> str:
        bad = [(name, part) for name, part in self._gradients() if not part.isfinite().all()]
        if not bad:
            return ""
        # The backward came to the last ones first: what is wrong began there.
        shown = [
            f"{name} ({int((~part.isfinite()).sum())} of {part.numel()} numbers)"
            for name, part in bad[: -_MOST_NAMES - 1 : -1]
        ]
        more = f" and {len(bad) - len(shown)} more" if len(bad) > len(shown) else ""
        stage = self._model.stage_of(bad[-1][0])
        return f"(stage {stage}) are not finite: {', '.join(shown)}{more}"

    def _say(self, step: int, findings: str) -> None:
        reporter = self._context.reporter
        assert reporter is not None
        reporter.observer.event("update_skipped", step=step, findings=findings)
        told = f": {findings}" if self._in_a_row == 1 else ", as that of the step before"
        reporter.observer.status(
            f"shardwright: the update of step {step} is left out{told} ({self.num_skipped} so far)"
        )


def _values_here(gradient: Tensor) -> Tensor:
    if type(gradient) is Tensor and gradient.layout is torch.strided:
        return gradient.detach() if gradient.requires_grad else gradient
    part = local_of(own_part(gradient)).detach()
    return values_of_sparse(part) if part.is_sparse else part


def _share(parts: Sequence[Tensor], place: int, num_places: int) -> list[Tensor]:
    """About as many numbers at each place: all parts have a place, and one alone."""
    ends = list(accumulate(part.numel() for part in parts))
    most = max(1, ends[-1]) if ends else 1
    return [p for p, end in zip(parts, ends, strict=True) if (end - 1) * num_places // most == place]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"


class _Column(IntEnum):
    """The columns of a rank's row; values that may be on a GPU come last.

    ``BUSY_S`` and ``PIPELINE_S`` are seconds of work, and from the first action to the last; ``MEMORY`` is in
    bytes. ``RECORDS`` of the first rank is 1 where the next step is to be recorded. ``BETWEEN_S`` is what the
    script took between two steps, ``HELD_UP_S`` what its process stood still. ``TRAINED`` is a digest of
    which parameters are trained, ``SAMPLES`` one of the batch, ``STREAM`` one of the first samples read from
    a stream; ``WEIGHT`` is the sum of the weights of losses; ``SCALED`` is the script's factor on gradients;
    from ``NUMBERS`` on come digests of what optimizers have. ``LOSS`` and ``GRADIENTS`` are sums that are
    finite where everything in them is.
    """

    BUSY_S = 0
    PIPELINE_S = 1
    MEMORY = 2
    RECORDS = 3
    BETWEEN_S = 4
    HELD_UP_S = 5
    TRAINED = 6
    SAMPLES = 7
    STREAM = 8
    WEIGHT = 9
    SCALED = 10
    NUMBERS = 11
    COMMON_NUMBERS = 12
    DEVICE_NUMBERS = 13
    COMMON_DEVICE_NUMBERS = 14
    LOSS = 15
    GRADIENTS = 16


class StepEnd:
    """The end of every training step of a model.

    Attributes:
        finiteness: whether the update is left out.
    """

    def __init__(self, context: Context, model: TrainedModel):
        self._context = context
        self._model = model
        self.finiteness = _Finiteness(context, model)
        self.numbers = GroupNumbers(context)
        self._samples = SameSamples(context)
        self._stream = SameStream(context)
        self._scaling = OwnScaling(context)

    def note(self, optimizer: Optimizer) -> bool:
        """An optimizer updates parameters of the model; returns whether it does so for the first time."""
        self._scaling.note(self._model.get_module().parameters())
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
            self._context, self._model.get_module(), columns[_Column.TRAINED], step=step
        )
        problem = problem or self.finiteness.judge(columns[_Column.LOSS :], run.losses or (), step=step)
        numbers = [each[_Column.NUMBERS : _Column.LOSS] for each in rows]
        problem = problem or self.numbers.judge(numbers, step=step)
        same = self._samples.look(columns[_Column.SAMPLES], step=step)
        problem = problem or same
        self._stream.look(columns[_Column.STREAM], step=step)
        self._scaling.look(columns[_Column.SCALED])
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
        total: float = sum(columns[_Column.WEIGHT])
        return total / len(rows)

    def figures_of(self, batch: Batch) -> Figures:
        """Gives the row of this rank, but for the losses, as soon as gradients are done; a step begins."""
        reporter = self._context.reporter
        assert isinstance(reporter, Reporter)
        reporter.begun_s = time.perf_counter()

        def of(row: Row | None) -> list[float]:
            if row is None:
                return [0.0] * len(_Column)
            figures: list[float] = row_of(self._told(row, batch), self._context.device).tolist()
            return figures

        return of

    def _told(self, row: Row, batch: Batch) -> list[float | Tensor]:
        """By columns; the weight and the losses come later."""
        reporter = self._context.reporter
        assert isinstance(reporter, Reporter)
        return [
            *reporter.figures_of(row),
            *(self._model.replicas.digest_of_trained, self._samples.digest(batch), FirstBatch.take(), 1.0),
            *(self._scaling.factor, *self.numbers.digests(), 0.0, self.finiteness.of_gradients()),
        ]

    def _rows(self, run: BatchResult, batch: Batch) -> Sequence[Sequence[float]]:
        weight = 1.0 if run.weights is None else run.weights.total
        loss = self.finiteness.of_losses(run)
        if run.figures is not None:  # of one replica, whose ranks have the same losses
            for figures in run.figures:
                figures[_Column.WEIGHT], figures[_Column.LOSS] = weight, float(loss)
            return run.figures
        told = self._told(run.row, batch)
        told[_Column.WEIGHT], told[_Column.LOSS] = weight, loss
        row, world = row_of(told, self._context.device), self._context.links.world
        # On a GPU this is where the host waits for the step.
        gathered = row[None] if world is None else world.gather(row, Purpose.FIGURES)
        rows: list[list[float]] = gathered.tolist()
        return rows
