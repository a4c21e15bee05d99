"""What the microbatches of a batch have in common on a rank."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.comm.joining.store import ValueBoard
from shardwright.runtime.crossings import Crossing
from shardwright.torch.backward.batch_data import BatchData
from shardwright.torch.execution.microbatches.own_attributes import OwnAttributes
from shardwright.torch.tracing.glue_buffers import GlueBuffers

__all__ = ["SharedByMicrobatches"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedByMicrobatches:
    """What the microbatches of a batch have in common on a rank.

    Attributes:
        function: the step function.
        receive: waits for a value of another rank; gets the index of the microbatch.
        board: where ranks put up values that the step function reads.
        device: where this rank computes.
        model: the whole model.
        parameters: gives the ids of its parameters.
        buffers: those that microbatches change, one after the other; None without any.
        attributes: those that microbatches change; None without any.
        data: follows what the first one computes; None where nobody looks.
    """

    function: Callable[..., Any]
    receive: Callable[[int, Crossing], Tensor]
    board: ValueBoard
    device: torch.device
    model: nn.Module
    parameters: Callable[[], Collection[int]]
    buffers: GlueBuffers | None
    attributes: OwnAttributes | None
    data: BatchData | None = None
