"""Warns where gradients of an earlier batch take memory that the plan gives to activations."""

import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from shardwright.plan import Plan
from shardwright.quantities import format_bytes
from shardwright.torch.tensor_parallel.divided_tensor import local_of

__all__ = ["KeptGradients"]

log = logging.getLogger(__name__)

_STEPS = 3
"""Steps that are looked at: a loop that keeps gradients has them in its second one."""


class KeptGradients:
    """Looks at the gradients that are there when the first steps begin.

    A plan counts the gradients of a rank from the backward that makes them
    (`planner.memory.rank_memory`). A loop that sums gradients over batches, or zeroes them in place, has them
    during the forwards, too.
    """

    def __init__(self) -> None:
        self._left = _STEPS

    def look(self, parameters: Iterable[Tensor], plan: Plan | None, pipeline_rank: int) -> None:
        """Warns once, where the rank may take more than its limit.

        Args:
            parameters: of this rank.
            plan: that is followed.
            pipeline_rank: whose memory the plan predicts.
        """
        if not self._left or plan is None or plan.prediction is None:
            return
        self._left -= 1
        prediction = plan.prediction
        limit = prediction.conditions.memory_limit_bytes if prediction.conditions is not None else 0
        memory = prediction.memory[pipeline_rank]
        gradients = [each.grad for each in parameters if each.grad is not None]
        dense = (local_of(each) for each in gradients if each.layout is torch.strided)
        # Of parameters that replicas share, this rank has some rows.
        kept = sum(getattr(each, "local", each).nbytes for each in dense) - memory.gradients_bytes
        if not limit or kept <= 0 or memory.peak_bytes + kept <= limit:
            return
        self._left = 0
        log.warning(
            "the gradients of the last batch are still there, and the plan counts on their %s: with them "
            "this rank may take %s, but its limit is %s. Call optimizer.zero_grad() between batches, without "
            "set_to_none=False. To sum gradients over batches, give the step function a larger batch with "
            "more microbatches, or set memory_limit to %s.",
            format_bytes(kept),
            format_bytes(memory.peak_bytes + kept),
            format_bytes(limit),
            format_bytes(max(limit - kept, 0)).replace(" ", ""),
        )
