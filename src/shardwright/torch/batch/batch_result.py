"""The result of one batch, as every engine returns it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwright.observe.timeline import Row
from shardwright.schedule import Action, Edge, Schedule
from shardwright.torch._private import storage_key
from shardwright.torch.batch.batch import Batch
from shardwright.torch.pytorch.tree import flatten

__all__ = ["BatchResult", "Figures", "StepEngine", "Weights", "detached", "places_of"]


class Weights(Protocol):
    """How much microbatches count: see `LossWeights`."""

    @property
    def shares(self) -> list[float]:
        """Of each microbatch, its samples over those of the batch."""

    @property
    def of_values(self) -> list[float]:
        """By what losses are multiplied, to add up to that of the batch."""

    @property
    def is_weighted(self) -> bool:
        """Whether losses are means over what counts, so that gradients may have to be divided."""

    @property
    def total(self) -> float:
        """What the gradients of the batch are still to be divided by."""


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """One batch.

    Attributes:
        results: what the step function returned, by microbatch.
        losses: what was given to ``backward``, by microbatch; None for an evaluation, and in it for a
            microbatch without a loss.
        samples: in the batch of this replica.
        tokens: in the batch of this replica; None if it is not made of tokens.
        flops: of the model's forward for the batch; 0 where they were not counted.
        row: what this rank did, action by action.
        outside_s: seconds of operations that rest on no unit, and that every rank of a pipeline runs; part of
            `row`, in no profile, and predicted as the last run measured them.
        memory: bytes in use at the end of each of them; empty where nobody asked.
        host_copies: (action, start, end) of copies of what units keep to the host and back.
        schedule: the order of work; None where it is none that has a name.
        edges: transfers between stages, with bytes.
        run_as: whether microbatches are run from a list of calls, or why not; empty where that is not asked.
        loss_places: among the leaves of each result, where it has the loss.
        weights: how much each loss counts, and each microbatch; None where all count alike.
        sums: of an evaluation, places of the numbers that are sums over samples.
        doubts: of an evaluation, places of numbers that are neither a sum nor a mean -> what they are.
        figures: of all ranks, for the step's end, where they came with what was computed; None where not.
    """

    results: list[Any]
    losses: Sequence[Tensor | None] | None
    samples: int
    tokens: int | None
    flops: float = 0.0
    row: Row = ()
    outside_s: float = 0.0
    memory: Sequence[int] = ()
    host_copies: Sequence[tuple[Action, float, float]] = ()
    schedule: Schedule | None = None
    edges: Sequence[Edge] = ()
    run_as: str = ""
    loss_places: Sequence[tuple[int, ...]] = ()
    weights: Weights | None = None
    sums: frozenset[int] = frozenset()
    doubts: Mapping[int, str] = field(default_factory=dict)
    figures: list[list[float]] | None = None

    @cached_property
    def loss_values(self) -> list[float | None]:
        """The losses as numbers, for which the host waits; the mean of one that has many."""
        there = [loss.double() for loss in self.losses or () if loss is not None]
        means = [loss if loss.dim() == 0 else loss.mean() for loss in there]
        values = iter(torch.stack(means).tolist() if means else ())
        return [None if loss is None else next(values) for loss in self.losses or ()]

    @property
    def pipeline_s(self) -> float:
        """Seconds from the first action of this rank to its last."""
        return self.row[-1][2] - self.row[0][1] if self.row else 0.0


Figures = Callable[[Row | None], Sequence[float]]
"""What a rank tells the others at a step's end, by its row of actions; None: it trains nothing."""


class StepEngine(Protocol):
    """Runs a step function on the microbatches of a batch.

    Attributes:
        reduced: ids of the parameters whose gradients are reduced.
    """

    @property
    def reduced(self) -> set[int]: ...

    def run(self, function: Callable[..., Any], batch: Batch, figures: Figures | None = None) -> BatchResult:
        """Collective over all ranks.

        Args:
            function: the step function.
            batch: its arguments.
            figures: gives those of this rank when gradients are done: they may go with other messages.
        """
        ...


def detached(tree: Any) -> Any:
    """The same tree with tensors that have no autograd history."""
    items, structure = flatten(tree)
    return structure.rebuild([item.detach() if isinstance(item, Tensor) else item for item in items])


def places_of(loss: Tensor, tree: Any) -> tuple[int, ...]:
    """Where among the leaves of a tree a loss is, or another view of it."""
    memory = storage_key(loss)
    return tuple(
        place
        for place, item in enumerate(flatten(tree)[0])
        if isinstance(item, Tensor) and item.numel() == 1 and storage_key(item) == memory
    )
