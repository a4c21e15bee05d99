"""One batch, as one pipeline rank runs it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.comm.trust.value_board import ValueBoard
from shardwright.schedule import Schedule
from shardwright.torch.batch.batch import Batch
from shardwright.torch.execution.loss_weights import LossWeights
from shardwright.torch.execution.trained_model import TrainedModel
from shardwright.torch.program.program import Program
from shardwright.torch.run.context import Context
from shardwright.torch.tracing.glue_buffers import GlueBuffers

__all__ = ["RankBatch", "number_of_parts"]


def number_of_parts(context: Context, model: TrainedModel, batch: Batch, wanted: int) -> int:
    """Into how many microbatches a batch is cut, where it is smaller than the first: the last of a loader.

    Fewer than wanted change nothing where each counts by its samples. Replicas may work together in each
    microbatch, so that they need equally many.
    """
    if batch.in_one:
        return 1
    samples = batch.num_samples
    if not samples or context.mesh.data > 1 or not model.average_grads_across_microbatches:
        return wanted
    return min(wanted, samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBatch:
    """One batch, as one pipeline rank runs it.

    Attributes:
        rank: the pipeline rank.
        schedule: lowered actions of all ranks.
        function: the step function.
        parts: the microbatches.
        programs: of each microbatch.
        board: where ranks put up values that a `ReadingStep` reads.
        losses: how much the loss of each microbatch counts.
        buffers: those of the model that the step function changes between modules; None without any.
        watch_memory: look after each action how much is in use.
    """

    rank: int
    schedule: Schedule
    function: Callable[..., Any]
    parts: Sequence[Batch]
    programs: Sequence[Program]
    board: ValueBoard
    losses: LossWeights
    buffers: GlueBuffers | None
    watch_memory: bool
