"""The result of one batch, and the output of a step: one value per microbatch."""

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from textwrap import shorten
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.observe.timeline import Row
from shardwright.run.step_recording import BatchRecord
from shardwright.runtime.step_function import MicrobatchValues
from shardwright.torch._private.tensors import storage_key
from shardwright.torch.batch.batch import Batch
from shardwright.torch.pytorch.tree import LEAF, Structure, flatten


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
    """Runs a step function on the microbatches of a batch."""

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


_LONGEST_NAMES = 200


class StepOutput(MicrobatchValues):
    """The tensors that a step function returned, one for each microbatch, on every rank.

    Attributes:
        outputs: the tensors, by microbatch.
    """

    advice = (
        "It holds one tensor for each microbatch. Make one of them first: reduce_mean() for a loss, concat() "
        "for what has a row for each sample."
    )

    def __init__(self, outputs: Sequence[Tensor], weights: Sequence[float] | None = None, doubt: str = ""):
        super().__init__(outputs)
        self._weights = weights
        self._doubt = doubt

    def reduce_mean(self) -> Tensor:
        """The value over the whole batch, element by element; shape as one of the microbatches.

        The loss that was trained is that of the batch: a mean over samples, or over the labels that count, or
        a sum where it is one. Numbers of an evaluation that are sums over samples add up, too. Anything else
        is a mean of the microbatches, weighed by their samples.
        """
        if self._doubt:
            warnings.warn(
                f"reduce_mean() of a number that is neither a mean nor a sum over samples: {self._doubt}. It "
                f"is the mean of those of {len(self.outputs)} microbatches, and not that of the batch. "
                "Return what it is made of (a mean, of which the loop takes the root), or set microbatches "
                "to 1.",
                stacklevel=2,
            )
        weights, stacked = self._weights, self.stack()
        alike = weights is None or (len(set(weights)) == 1 and len(weights) * weights[0] == 1)
        if weights is None or alike or not stacked.is_floating_point():
            return stacked.mean(0)
        chosen = [place for place, weight in enumerate(weights) if weight]
        factors = stacked.new_tensor([weights[place] for place in chosen])
        total: Tensor = torch.tensordot(factors, stacked[chosen], dims=1)
        return total

    def reduce_sum(self) -> Tensor:
        """The sum over the microbatches, element by element; shape as one of them."""
        return self.stack().sum(0)

    def concat(self, dim: int = 0) -> Tensor:
        """The microbatches one after the other along an existing dim, as if the batch had not been split."""
        if self.outputs[0].dim() == 0:
            return self.stack()
        return torch.cat(self.outputs, dim)

    def stack(self, dim: int = 0) -> Tensor:
        """The microbatches along a new dim.

        Raises:
            UsageError: they have different shapes.
        """
        self.refuse_different_shapes()
        return torch.stack(self.outputs, dim)

    def detach(self) -> "StepOutput":
        """The same tensors without autograd history."""
        return StepOutput([output.detach() for output in self.outputs], self._weights, self._doubt)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        # torch.mean(output), and tensor + output.
        name = getattr(func, "__name__", "a function of PyTorch")
        raise UsageError(f"{name}() takes tensors, and a StepOutput is none. {cls.advice}")

    def __repr__(self) -> str:
        return (
            f"StepOutput({len(self.outputs)} microbatches of {tuple(self.outputs[0].shape)}; "
            "reduce_mean() makes one tensor of them)"
        )


def gather_outputs(
    results: Sequence[Any],
    *,
    shares: Sequence[float] | None = None,
    loss_places: Sequence[Collection[int]] = (),
    of_losses: Sequence[float] = (),
    sums: Collection[int] = (),
    doubts: Mapping[int, str] | None = None,
) -> Any:
    """Turns one result a microbatch into one result: tensors become `StepOutput`, other things lists.

    A result that is None in every microbatch stays None. Dictionaries may have their keys in another order in
    each microbatch.
    """
    structure, columns = _columns(results)
    losses = set(loss_places[0]).intersection(*loss_places[1:]) if loss_places else ()
    ones, doubts = [1.0] * len(results), doubts or {}
    return structure.rebuild(
        [
            _combine(
                column,
                of_losses if place in losses else ones if place in sums else shares,
                doubts.get(place, ""),
            )
            for place, column in enumerate(columns)
        ]
    )


def _columns(results: Sequence[Any]) -> tuple[Structure, list[list[Any]]]:
    """The structure of the results, and for each of its leaves what stands there in each microbatch."""
    if all(isinstance(result, Tensor) for result in results):
        return LEAF, [list(results)]
    structure = flatten(results[0])[1]
    paths = structure.paths()
    columns: list[list[Any]] = [[] for _ in paths]
    for microbatch, result in enumerate(results):
        items = _by_path(result)
        if items.keys() != set(paths):
            here = [path for path in items if path not in paths]
            there = [path for path in paths if path not in items]
            alone = " and ".join(
                f"{_named(some)} in microbatch {number} alone"
                for some, number in ((here, microbatch), (there, 0))
                if some
            )
            raise UsageError(
                f"the step function returns {alone}, so there is not one value a microbatch to put together. "
                "Return the same keys, and lists of the same length, in every microbatch, with None where "
                "there is no value. What has an entry for each sample is returned as a tensor, and its parts "
                "are put together by concat()."
            )
        for column, path in zip(columns, paths, strict=True):
            column.append(items[path])
    return structure, columns


def _by_path(result: Any) -> dict[tuple[Any, ...], Any]:
    items, structure = flatten(result)
    return dict(zip(structure.paths(), items, strict=True))


def _named(paths: Iterable[tuple[Any, ...]]) -> str:
    """Names parts of a result as an error does: ``result['loss'][0]``."""
    names = ["result" + "".join(f"[{key!r}]" for key in path) for path in paths]
    return shorten(", ".join(names), _LONGEST_NAMES) if names else "nothing"


def _combine(column: list[Any], weights: Sequence[float] | None, doubt: str) -> Any:
    if all(isinstance(item, Tensor) for item in column):
        return StepOutput(column, weights, doubt)
    if all(item is None for item in column):
        return None
    return column
