"""The result of one batch, as every engine returns it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwright.observe.timeline import Row
from shardwright.run.step_recording import BatchRecord
from shardwright.torch._private import storage_key
from shardwright.torch.batch.batch import Batch
from shardwright.torch.pytorch.tree import flatten


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
class BatchResult(BatchRecord):
    """One batch.

    Attributes:
        results: what the step function returned, by microbatch.
        losses: what was given to ``backward``, by microbatch; None for an evaluation, and in it for a
            microbatch without a loss.
        loss_places: among the leaves of each result, where it has the loss.
        weights: how much each loss counts, and each microbatch; None where all count alike.
        sums: of an evaluation, places of the numbers that are sums over samples.
        doubts: of an evaluation, places of numbers that are neither a sum nor a mean -> what they are.
        figures: of all ranks, for the step's end, where they came with what was computed; None where not.
    """

    results: list[Any]
    losses: Sequence[Tensor | None] | None
    loss_places: Sequence[tuple[int, ...]] = ()
    weights: Weights | None = None
    sums: frozenset[int] = frozenset()
    doubts: Mapping[int, str] = field(default_factory=dict)
    figures: list[list[float]] | None = None

    @cached_property
    def loss_values(self) -> list[float | None]:
        """The losses as numbers, for which the host waits; the mean of one that has many."""
        there = [loss for loss in self.losses or () if loss is not None]
        means = [loss if loss.dim() == 0 else loss.double().mean() for loss in there]
        if all(loss.device.type == "cpu" for loss in there):
            values = iter([loss.item() for loss in means])
        else:
            values = iter(torch.stack([loss.double() for loss in means]).tolist())
        return [None if loss is None else next(values) for loss in self.losses or ()]

    @cached_property
    def loss(self) -> float | None:
        """That of the batch: those of microbatches, each by how much it counts; None without any."""
        losses = self.loss_values
        equal = [1 / max(len(losses) - losses.count(None), 1)] * len(losses)
        weights = equal if self.weights is None else self.weights.of_values
        # None for microbatches that the step function has left out.
        known = [loss * weight for loss, weight in zip(losses, weights, strict=True) if loss is not None]
        return sum(known) if known else None


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
        """Collective over all ranks."""
        ...


def detached(tree: Any) -> Any:
    """The same tree with tensors that have no autograd history."""
    if isinstance(tree, Tensor):
        return tree.detach()
    items, structure = flatten(tree)
    return structure.rebuild([item.detach() if isinstance(item, Tensor) else item for item in items])


def places_of(loss: Tensor, tree: Any) -> tuple[int, ...]:
    """Where among the leaves of a tree a loss is, or another view of it."""
    memory = storage_key(loss)
    if isinstance(tree, Tensor):
        return (0,) if tree.numel() == 1 and storage_key(tree) == memory else ()
    return tuple(
        place
        for place, item in enumerate(flatten(tree)[0])
        if isinstance(item, Tensor) and item.numel() == 1 and storage_key(item) == memory
    )
