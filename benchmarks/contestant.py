"""Who takes part in a race: a side, and what it does."""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from models import Task, even_stages
from peer_pipelining import KINDS, Peer
from shardwright_side import STAGES_PER_RANK, Ours

__all__ = ["Contestant", "contestant"]


class Contestant(Protocol):
    """What runs on each rank.

    Attributes:
        loss: of the last step; None on ranks that do not know it.
    """

    loss: float | None

    def step(self) -> None:
        """Forward and backward of one batch."""


def contestant(name: str, task: Task, *, microbatches: int) -> Contestant:
    """Builds one; collective over its ranks.

    Args:
        name: ``peer 1F1B``, ``ours zb_v`` (the stages are the peer's), ``ours free`` (the library chooses
            schedule and stages) or ``plain batch`` (see `Plain`).
        task: what is trained.
        microbatches: parts into which a batch is split.
    """
    model = task.build()
    side, kind = name.split(" ", 1)
    num_ranks = dist.get_world_size()
    if side == "plain":
        return Plain(task, model, kind=kind, microbatches=microbatches)
    if side == "peer":
        stages = even_stages(model, num_ranks * KINDS[kind])
        return Peer(task, model, stages, kind=kind, microbatches=microbatches)
    if kind == "free":
        return Ours(task, model, {"microbatches": microbatches})
    per_rank = STAGES_PER_RANK[kind]
    settings = {"microbatches": microbatches, "pipeline": kind, "virtual_stages": per_rank}
    return Ours(task, model, settings, stages=even_stages(model, num_ranks * per_rank))


class Plain:
    """One process with one thread and no library.

    Args:
        task: what is trained.
        model: used as it is.
        kind: ``batch``: the first rank runs the batch whole, the others rest; ``microbatches``: the same,
            piece by piece; ``crowd``: every rank runs the batch whole at the same time, so that all share
            caches and memory as the ranks of a pipeline do.
        microbatches: pieces.
    """

    def __init__(self, task: Task, model: nn.Module, *, kind: str, microbatches: int):
        self._task, self._model = task, model
        self._active = kind == "crowd" or dist.get_rank() == 0
        inputs, targets = task.batch()
        pieces = microbatches if kind == "microbatches" else 1
        self._pieces = list(zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True))
        self.loss: float | None = None

    def step(self) -> None:
        """Forward and backward of one batch."""
        if not self._active:
            return
        self._model.zero_grad(set_to_none=True)
        losses = []
        for inputs, targets in self._pieces:
            loss = self._task.loss(self._model(inputs), targets)
            (loss / len(self._pieces)).backward()
            losses.append(loss.detach())
        self.loss = float(torch.stack(losses).mean())
