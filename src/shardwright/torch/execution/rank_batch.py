"""One batch, as one pipeline rank runs it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.comm.trust.value_board import ValueBoard
from shardwright.schedule import Schedule
from shardwright.torch.batch.batch import Batch
from shardwright.torch.execution.loss_weights import LossWeights
from shardwright.torch.program.program import Program
from shardwright.torch.tracing.glue_buffers import GlueBuffers

__all__ = ["RankBatch"]


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
