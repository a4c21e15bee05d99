"""How a loss is reduced over samples: a mean, a sum, a mean over what counts, or neither.

The answer stands in autograd's graph behind the loss, in its last few nodes::

    loss ◄── Div ◄── Sum ◄── rows: one or more for each sample ◄── the model
              ▲
              └── a count: how many labels are no padding

A mean of the batch is the mean of its microbatches, weighed by their samples, or by what counts in them; a
sum of the batch is the sum of theirs. A loss that is neither (a square root of a mean, pairs of samples) has
no value that follows from those of its microbatches.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from shardwright.torch.backward.loss_terms import Neither, Reduction, Rows, Term, name_of_node
from shardwright.torch.backward.loss_walk import LossWalk

__all__ = ["LossForm", "Reduction", "form_of_loss"]


@dataclass(frozen=True, slots=True)
class LossForm:
    """How a loss is reduced.

    Attributes:
        counts: of each term of a weighted mean, gives how much counts in it; the samples for a plain mean.
        reason: why it, or a term of it, is neither or unknown: what the loss does.
        divisor: the number that a sum is divided by.
        of_data: a statistic of the batch's data that it is computed with.
        is_clamped: a count that it may be divided by is kept above a number.
        is_certain: no operation stands behind it of which a trace knows the shapes alone: ``loss[mask]``.
    """

    reduction: Reduction
    counts: tuple[Callable[[], float], ...] = ()
    reason: str = ""
    divisor: float = 1.0
    of_data: str = ""
    is_certain: bool = True
    is_clamped: bool = False


def form_of_loss(
    loss: Tensor,
    *,
    samples: int,
    is_constant: Callable[[Tensor], bool] = lambda tensor: False,
    is_fixed: Callable[[Tensor], bool] = lambda tensor: False,
    is_count: Callable[[Tensor], bool] = lambda tensor: False,
) -> LossForm:
    """Reads from autograd's graph how a loss is reduced."""
    walk = LossWalk(loss, samples, is_constant, is_fixed, is_count)
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
        return LossForm(Reduction.UNKNOWN, reason=walk.unknown, is_certain=not walk.guesses)
    if Reduction.SUM in kinds and len(kinds) > 1:
        return LossForm(Reduction.NEITHER, reason=aside or "it adds a sum and a mean over samples")
    kinds.discard(Reduction.NEITHER)
    if not kinds:
        return LossForm(Reduction.NEITHER, reason=aside)
    if Reduction.WEIGHTED not in kinds:
        divisor = max(term.divisor for term in terms)
        certain, of_data = not walk.guesses, walk.of_number
        return LossForm(max(kinds), reason=aside, divisor=divisor, of_data=of_data, is_certain=certain)
    counts = tuple(
        term.count or (lambda: float(samples))
        for term in terms
        if term.reduction in (Reduction.MEAN, Reduction.WEIGHTED) and not term.is_fixed
    )
    return LossForm(Reduction.WEIGHTED, counts=counts, reason=aside)
