"""The peer: `torch.distributed.pipelining`, with stages made by hand."""

import copy
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining as torch_pipelining

from models import Layered, Task

__all__ = ["KINDS", "Peer"]

KINDS = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
"""The schedules that it ships, with the stages on each rank."""

_V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


class Peer:
    """One schedule of the peer on one model; every rank keeps its own stages.

    Args:
        task: what is trained.
        model: a copy of its stages is taken.
        stages: names of the submodules of each stage.
        kind: one of `KINDS`.
        microbatches: parts into which a batch is split.
    """

    def __init__(
        self, task: Task, model: Layered, stages: Sequence[Sequence[str]], *, kind: str, microbatches: int
    ):
        rank, num_ranks, num_stages = dist.get_rank(), dist.get_world_size(), len(stages)
        if kind in _V_SHAPED:
            own = [rank, num_stages - 1 - rank]
        else:
            own = list(range(rank, num_stages, num_ranks))
        self._inputs, self._targets = task.batch()
        self._has_first, self._has_last = 0 in own, num_stages - 1 in own
        self.modules = {
            index: nn.Sequential(*(copy.deepcopy(model.get_submodule(name)) for name in stages[index]))
            for index in own
        }
        built = [
            torch_pipelining.PipelineStage(module, index, num_stages, torch.device("cpu"))
            for index, module in self.modules.items()
        ]
        schedule = getattr(torch_pipelining, f"Schedule{kind}")
        self._schedule = schedule(built if KINDS[kind] > 1 else built[0], microbatches, loss_fn=task.loss)
        self.loss: float | None = None

    def step(self) -> None:
        """Forward and backward of one batch; afterwards the last stage's rank knows the loss."""
        for module in self.modules.values():
            module.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        inputs = (self._inputs,) if self._has_first else ()
        last = {"target": self._targets, "losses": losses} if self._has_last else {}
        self._schedule.step(*inputs, return_outputs=False, **last)
        if losses:
            self.loss = float(torch.stack([loss.detach() for loss in losses]).mean())
