"""What a loss, or an evaluation's number, is over samples: a mean, a sum, or neither.

The answer stands in autograd's graph behind the loss, in its last few nodes::

    loss ◄── Div ◄── Sum ◄── rows: one or more for each sample ◄── the model
              ▲
              └── a count: how many labels are no padding

A mean of the batch is the mean of its microbatches, weighed by their samples, or by what counts in them; a
sum of the batch is the sum of theirs. A loss that is neither (a square root of a mean, pairs of samples) has
no value that follows from those of its microbatches.

Under ``no_grad`` no graph of autograd tells it. So the operations behind the model's calls run once more, on
shadows of their tensors, which have a history and no data::

    z = model(x)                                  a shadow of z: a leaf
    F.nll_loss(z, y, reduction="sum")             the same on the shadow: a graph to read

Without data nothing is drawn twice, or added twice to what a script counts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.torch._private.tensors import TorchFunctionMode, fake_failures_unlogged, new_fake_mode
from shardwright.torch.backward.loss_terms import Neither, Reduction, Rows, Term, name_of_node
from shardwright.torch.backward.loss_walk import LossWalk
from shardwright.torch.interception.step_code import in_step_code
from shardwright.torch.pytorch.functions import is_metadata, on_fakes
from shardwright.torch.pytorch.tree import leaves, map_tree


@dataclass(frozen=True, slots=True)
class LossForm:
    """How a loss is reduced.

    Attributes:
        counts: of each term of a weighted mean, gives how much counts in it; the samples for a plain mean.
        reason: why it, or a term of it, is neither or unknown: what the loss does.
        of_data: a statistic of the batch's data that it is computed with.
        is_clamped: a count that it may be divided by is kept above a number.
        divides_by_count: what a trace could not follow is divided by a number of the microbatch.
        unknown: what computes a term of which it cannot be told, beside others.
        is_certain: no operation stands behind it of which a trace knows the shapes alone: ``loss[mask]``.
    """

    reduction: Reduction
    counts: tuple[Callable[[], float], ...] = ()
    reason: str = ""
    divisor: float = 1.0
    of_data: str = ""
    is_certain: bool = True
    is_clamped: bool = False
    divides_by_count: bool = False
    unknown: str = ""


def form_of_loss(
    loss: Tensor,
    *,
    samples: int,
    is_constant: Callable[[Tensor], bool] = lambda tensor: False,
    is_fixed: Callable[[Tensor], bool] = lambda tensor: False,
    is_count: Callable[[Tensor], bool] = lambda tensor: False,
    products: dict[Any, list[bool]] | None = None,
) -> LossForm:
    """Reads from autograd's graph how a loss is reduced.

    `products` keeps, for other losses of the same function, which operands of products are weights.
    """
    walk = LossWalk(loss, samples, is_constant, is_fixed, is_count, {} if products is None else products)
    try:
        found = walk.flow(loss.grad_fn, 0) if loss.grad_fn is not None else Rows.FIXED
    except Neither as answer:
        return LossForm(Reduction.NEITHER, reason=str(answer))
    except Exception as error:  # a node that is none of those known here
        return LossForm(Reduction.UNKNOWN, reason=f"{name_of_node(loss.grad_fn)} ({error})")
    terms = found if isinstance(found, tuple) else (Term(Reduction.MEAN),)
    kinds = {term.reduction for term in terms} - {Reduction.UNKNOWN}
    aside = next((term.reason for term in terms if term.reduction is Reduction.NEITHER), "")
    if not kinds:
        return LossForm(
            Reduction.UNKNOWN,
            reason=walk.unknown,
            is_certain=not walk.guesses,
            divides_by_count=walk.divides_by_count,
        )
    is_mixed = any(term.reduction is Reduction.UNKNOWN for term in terms)
    unknown = (walk.unknown or "code") if is_mixed and not walk.guesses else ""
    if Reduction.SUM in kinds and len(kinds) > 1:
        return LossForm(Reduction.NEITHER, reason=aside or "it adds a sum and a mean over samples")
    kinds.discard(Reduction.NEITHER)
    if not kinds:
        return LossForm(Reduction.NEITHER, reason=aside)
    if Reduction.WEIGHTED not in kinds:
        divisor = max(term.divisor for term in terms)
        certain, of_data = not walk.guesses, walk.of_number
        return LossForm(max(kinds), (), aside, divisor, of_data, certain, unknown=unknown)
    counts = tuple(
        term.count or (lambda: float(samples))
        for term in terms
        if term.reduction in (Reduction.MEAN, Reduction.WEIGHTED) and not term.is_fixed
    )
    return LossForm(Reduction.WEIGHTED, counts=counts, reason=aside, unknown=unknown)


class Shadows:
    """Repeats the operations of an evaluation on tensors with a history."""

    def __init__(self, fake: Callable[[Any], Any]):
        self._fake = fake
        self._of: dict[int, tuple[Any, Tensor]] = {}  # with what has the shadow, which must not go away

    def begin(self, made: Iterable[Any]) -> None:
        with torch.inference_mode(False):
            for item in made:
                if isinstance(item, Tensor) and item.is_floating_point() and item.grad_fn is None:
                    self._of[id(item)] = item, self._fake(item).detach().requires_grad_()

    def operation(self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """Repeats an operation, if it takes what has a shadow."""
        given = {id(item): item for item in leaves((args, kwargs)) if isinstance(item, Tensor)}
        if given.keys().isdisjoint(self._of):
            return
        results = leaves(result)
        changed = given.keys() & {id(item) for item in results}

        def shadow(item: Any) -> Any:
            if id(item) not in self._of:
                return self._fake(item)
            found = self._of[id(item)][1]
            return found.clone() if id(item) in changed else found

        try:
            with torch.inference_mode(False), torch.enable_grad(), fake_failures_unlogged():
                shadows = leaves(on_fakes(func)(*map_tree(shadow, args), **map_tree(shadow, kwargs)))
        except Exception:  # nothing is known of what it gives
            shadows = [None] * len(results)
        for item, made in zip(results, shadows, strict=False):
            if isinstance(made, Tensor) and made.requires_grad:
                self._of[id(item)] = item, made
            else:
                self._of.pop(id(item), None)

    def forms(self, result: Any, *, samples: int) -> dict[int, LossForm]:
        """How the numbers that a step function has returned are reduced over samples."""
        found = {}
        for place, item in enumerate(leaves(result)):
            if not isinstance(item, Tensor) or item.numel() != 1:
                continue
            known = self._of.get(id(item))
            graph = known[1] if known else item if item.grad_fn is not None else self._fake(item)
            if graph.requires_grad:
                found[place] = form_of_loss(graph, samples=samples)
        return found


class WatchedEvaluation(TorchFunctionMode):
    """Follows a step function that runs as it is, on one rank, with shadows."""

    def __init__(self) -> None:
        super().__init__()
        mode = new_fake_mode()

        def fake(item: Any) -> Any:
            if not isinstance(item, Tensor):
                return item
            with mode:  # and not as mode.from_tensor, which keeps the tensors of an inference what they are
                return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=item.device)

        self.shadows = Shadows(fake)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if in_step_code() and not is_metadata(func):
            self.shadows.operation(func, args, kwargs or {}, result)
        return result


def forms_of_batch(
    of_parts: Sequence[Mapping[int, LossForm]], stated: str | None
) -> tuple[frozenset[int], dict[int, str]]:
    """What is known of the numbers of a batch."""
    if stated == "mean" or not of_parts:
        return frozenset(), {}
    places = set(of_parts[0]).intersection(*of_parts[1:])
    forms = {place: [part[place] for part in of_parts] for place in places}
    if stated == "sum":
        return frozenset(places), {}
    sums = {p for p, each in forms.items() if all(form.reduction is Reduction.SUM for form in each)}
    neither = {
        place: form.reason
        for place, each in forms.items()
        for form in each
        if form.reduction is Reduction.NEITHER
    }
    return frozenset(sums), neither
