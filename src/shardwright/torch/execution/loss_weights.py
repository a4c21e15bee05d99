"""How much the loss of each microbatch counts, in gradients and in what is told: the one place that says so.

::

    loss of a microbatch ── form_of_loss ──► mean      its samples / those of the batch
                                             weighted  its labels that count / those of the batch
                                             sum       1: microbatches and replicas add up
                                             neither   refused where a batch is cut

How many labels of a batch count is known only when all microbatches of all replicas are, so losses are
weighed by those of the first microbatch; over replicas, by about those of the batch before, a power of two
that rounds nothing. Gradients are divided by the ratio at the end of the step, in which ranks exchange a row
of numbers anyway.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from math import isclose, log2
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.torch._private.tensors import storage_key
from shardwright.torch.backward.batch_data import BatchData
from shardwright.torch.backward.loss_reduction import LossForm, form_of_loss
from shardwright.torch.backward.loss_terms import Reduction
from shardwright.torch.batch.batch import Batch
from shardwright.torch.batch.step_output import Weights
from shardwright.torch.execution.agreement import TrainedModel
from shardwright.torch.loss_scale import EarlierGradients
from shardwright.torch.parameters.quantized import shapes_of_quantized
from shardwright.torch.parameters.sharded_tensor import own_part
from shardwright.torch.pytorch.modules import all_parameters, line_of
from shardwright.torch.tensor_parallel.divided_tensor import local_of

log = logging.getLogger(__name__)

_NO_LOSS = -1.0


class LossWeights:
    """The weights of the losses of one batch of one replica.

    Attributes:
        shares: of each microbatch, its samples over those of the batch.
        weights: of each loss so far: its share of the samples, or of what counts; 1 in a sum.
        data: what its microbatch is computed with, where somebody looks.
    """

    def __init__(
        self,
        model: TrainedModel,
        function: Any,
        parts: Sequence[Batch],
        *,
        replicas: int,
        told: set[str],
        tells: bool = True,
    ):
        self.data: BatchData | None = None
        self._tells = tells
        self._model = model
        self._parts = parts
        self._function = function
        self._replicas = replicas
        self._told = told
        self._stated = getattr(function, "loss_reduction", None)
        sizes = [part.num_samples for part in parts]
        total = sum(size for size in sizes if size is not None)
        num = len(parts)
        self.shares = [1 / num if size is None or not total else size / total for size in sizes]
        self.reduction = Reduction.UNKNOWN
        self.weights: list[float] = [_NO_LOSS] * num
        self._samples = total or num
        self._first_counts: list[float] = []
        self._divisor = 0.0
        self._labels = 0.0
        self._own: set[Any] = set()  # memory of parameters and buffers, shapes of quantized ones

    def check(self, forms: Iterable[LossForm | None], *, tells: bool = True) -> None:
        """Refuses to cut a batch whose loss does not follow from those of its microbatches."""
        num = len(self._parts)
        if self._stated is not None or num * self._replicas == 1:
            return
        if not self._model.average_grads_across_microbatches:
            return
        for form in forms:
            if form is None:
                continue
            if tells:
                self._tell(form)
                if form.of_data and num > 1:
                    self._warn_once(
                        f"is computed with {form.of_data}, and each of {num} microbatches takes its own. "
                        "Compute that from the whole batch, before the step function, and pass what follows "
                        "from it; or set microbatches to 1."
                    )
            if form.reduction is Reduction.NEITHER and num > 1:
                raise UsageError(
                    f"{line_of(self._function)}: the loss is neither a mean nor a sum over samples: "
                    f"{form.reason}. Cut into {num} microbatches, it would train otherwise than in one "
                    "process. Set microbatches to 1. If each microbatch may stand for itself (a contrastive "
                    'loss that sees the negatives of its microbatch alone), say so: loss_reduction="mean" '
                    '("sum" where they add up), of @sw.step, Accelerator or ShardwrightStrategy.'
                )

    @property
    def is_split(self) -> bool:
        """Whether a batch is computed in several parts: microbatches, or those of replicas."""
        return len(self._parts) * self._replicas > 1

    def watch_data(self) -> BatchData | None:
        """Follows the data of the first microbatch where code behind a trace computes the loss; once."""
        key = f"{line_of(self._function)}: data"
        is_looked_at = self._stated is not None or key in self._told
        if is_looked_at or not self.is_split or not torch.is_grad_enabled():
            return None
        self._told.add(key)
        self.data = BatchData(self._parts[0].num_samples or 1, lambda tensor: tensor.requires_grad)
        return self.data

    def _tell(self, form: LossForm) -> None:
        """Says once what a script might not expect."""
        if form.reduction is Reduction.SUM:
            self._warn_once(
                "is a sum over samples: microbatches, and replicas, add up to what one process has. If it is "
                'a mean, say so: @sw.step(loss_reduction="mean").'
            )
        elif form.reduction is Reduction.UNKNOWN and form.is_certain:
            self._warn_once(
                f"is computed by {form.reason or 'code'}, which shows no sum and no mean. It is taken for a "
                'mean over samples; @sw.step(loss_reduction="sum") says otherwise.'
            )
        elif form.reason and form.reduction not in (Reduction.NEITHER, Reduction.UNKNOWN):
            self._warn_once(
                f"has a term that is no mean over samples: {form.reason}. That term is the mean of those of "
                "the microbatches, and not quite that of one process."
            )
        elif form.unknown:
            self._warn_once(
                f"has a term that is computed by {form.unknown}, which shows no sum and no mean. It is taken "
                "for what the other terms are; where it joins samples, set microbatches to 1."
            )

    def _warn_once(self, what: str, *, tells: bool = False) -> None:
        line = f"{line_of(self._function)}: the loss {what}"
        if (tells or self._tells) and line not in self._told:
            self._told.add(line)
            log.warning("%s", line)

    def factor(self, index: int, loss: Tensor, *, form: LossForm | None = None) -> float:
        """The factor on the gradient of the loss of a microbatch; 0 where nothing in it counts."""
        scale = self._model.loss_scale
        if not self._model.average_grads_across_microbatches:
            self.weights[index] = self.shares[index]
            return scale
        reduction = self._reduction(index, loss, form)
        kinds = {reduction, self.reduction} - {Reduction.UNKNOWN}
        if Reduction.SUM in kinds and len(kinds) > 1:
            raise UsageError(
                f"{line_of(self._function)}: the loss is a sum over samples in some microbatches, and a mean "
                "in others: it may be divided by a number that is the size of some of them. Say what it is: "
                '@sw.step(loss_reduction="sum"), or "mean".'
            )
        self.reduction = max(self.reduction, reduction)
        if self.reduction is Reduction.SUM:
            self.weights[index] = 1.0
            return scale * self._replicas
        weight = self.shares[index]
        if self._count is not None:
            weight = self._count / self._labels_of_batch(index, self._count)
        self.weights[index] = weight
        return weight * scale

    def _reduction(self, index: int, loss: Tensor, form: LossForm | None) -> Reduction:
        """How the loss of a microbatch is reduced; notes how much counts in it."""
        self._count: float | None = None
        if self._stated is not None:
            return Reduction[self._stated.upper()]
        if loss.numel() != 1 or (
            len(self._parts) == 1 and self._replicas == 1
        ):  # its gradient says what it is
            return Reduction.MEAN
        is_guess = form is not None and not form.is_certain
        is_quotient = form is not None and form.divisor != 1
        if form is None or is_guess or is_quotient or form.reduction is Reduction.WEIGHTED:
            here = self._form_here(loss, self._parts[index], form)
            if form is None or (is_guess and (here.reduction or not form.reduction)):
                form = None  # the graph at hand knows better
            if here.reduction is Reduction.SUM:
                before, self._divisor = self._divisor or here.divisor, here.divisor
                if before != here.divisor:
                    reason = (
                        f"it divides a sum by {before:g} in one microbatch, by {here.divisor:g} in another"
                    )
                    form, here = None, LossForm(Reduction.NEITHER, reason=reason)
            if form is None:
                self.check([here])
            if here.counts:
                self._count = self._alike([count() for count in here.counts])
                self._look_for_clamped(form)
            elif form is not None and form.reduction is Reduction.WEIGHTED and not is_guess:
                self._warn_once(
                    "is a mean over labels that another stage counts: microbatches count by their samples. "
                    "Place the loss behind the last layer."
                )
            form = form or here
        return Reduction.MEAN if form.reduction in (Reduction.NEITHER, Reduction.UNKNOWN) else form.reduction

    def _look_for_clamped(self, form: LossForm | None) -> None:
        """Points out a count of 1 that may be none: the loss of its microbatch is not 0."""
        if self.data is not None and self.data.is_clamped:
            self._function.clamps_counts = True
        is_clamped = form.is_clamped if form is not None else getattr(self._function, "clamps_counts", False)
        if is_clamped and self._count == 1:
            self._warn_once(
                "is divided by a count that is kept at 1 or more, and is 1 in a microbatch. If nothing "
                "counts there, that microbatch has a share all the same, other than in one process. Count in "
                "the whole batch, before the step function, and pass the number; or set microbatches to 1.",
                tells=True,
            )

    def _form_here(self, loss: Tensor, part: Batch, traced: LossForm | None) -> LossForm:
        """How a loss is reduced over the samples of a microbatch, which is at hand."""
        if self._model.replicas.sharding is not None:
            self._own.clear()  # rows come and go

        def is_constant(tensor: Tensor) -> bool:
            uncut = (leaf for _, leaf, cut in part.named_leaves() if isinstance(leaf, Tensor) and not cut)
            memory = storage_key(tensor)
            return any(leaf.layout is torch.strided and storage_key(leaf) == memory for leaf in uncut)

        def is_fixed(tensor: Tensor) -> bool:
            if not self._own:
                module = self._model.get_module()
                self._own.update(storage_key(each) for each in (*all_parameters(module), *module.buffers()))
                self._own.update(shapes_of_quantized(module))
            return storage_key(tensor) in self._own or tensor.shape in self._own

        def is_count(divisor: Tensor) -> bool:
            if self.data is not None and self.data.is_count(divisor):
                self._function.divides_by_counts = True
            is_weighted = traced is not None and (
                traced.reduction is Reduction.WEIGHTED or traced.divides_by_count
            )
            return is_weighted or bool(getattr(self._function, "divides_by_counts", False))

        form = form_of_loss(
            loss,
            samples=part.num_samples or 1,
            is_constant=is_constant,
            is_fixed=is_fixed,
            is_count=is_count,
            products=getattr(self._function, "products", None),
        )
        return form if self.data is None else replace(form, of_data=self.data.found or form.of_data)

    def _alike(self, counts: Sequence[float]) -> float:
        """What counts in the first term; the others of a microbatch should have the same share of theirs."""
        self._first_counts = self._first_counts or list(counts)
        pairs = zip(counts, self._first_counts, strict=False)
        ratios = [count / first for count, first in pairs if first]
        if any(not isclose(ratio, ratios[0]) for ratio in ratios):
            self._warn_once(
                "adds means over different numbers of labels. Those of the first weigh the microbatches, "
                "so the others are not those of one process. Set microbatches to 1 where that matters."
            )
        return counts[0]

    def _labels_of_batch(self, index: int, count: float) -> float:
        """What losses are weighed by; replicas do not know the labels, or samples, of each other."""
        if not self._labels:
            a_sample = count / (self._parts[index].num_samples or 1) if self._replicas == 1 else 0.0
            self._labels = a_sample * self._samples or self._model.labels_of_batch or 1.0
        return self._labels

    # ---- over ranks ----

    @property
    def row(self) -> list[float]:
        """The reduction and the weights, for the ranks that have no loss: (1 + microbatches)."""
        return [float(self.reduction), *self.weights]

    def take(self, rows: Sequence[Sequence[float]]) -> None:
        """Takes the rows of all ranks of the replica: (ranks, 1 + microbatches)."""
        reduction, *self.weights = map(max, zip(*rows, strict=True))
        self.reduction = Reduction(int(reduction))

    # ---- when all microbatches are known ----

    @cached_property
    def known(self) -> list[float]:
        """The weights as numbers; 0 for microbatches without a loss."""
        return [max(float(weight), 0.0) for weight in self.weights]

    def counted(self, losses: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The losses of the microbatches; None where nothing counts: a mean of no labels is NaN."""
        return [loss if weight else None for loss, weight in zip(losses, self.known, strict=True)]

    @property
    def is_weighted(self) -> bool:
        """Whether the losses are means over what counts."""
        return self.reduction is Reduction.WEIGHTED

    @property
    def total(self) -> float:
        """What the gradients of the batch are still to be divided by."""
        return sum(self.known) if self.is_weighted else 1.0

    @cached_property
    def of_values(self) -> list[float]:
        """By what the losses of microbatches are multiplied, to add up to that of the batch."""
        total = 1.0 if self.reduction is Reduction.SUM else sum(self.known)
        return [weight / total if total else 0.0 for weight in self.known]


class WeighedGradients:
    """Divides the gradients of a batch by the weights of its losses, where these do not add up to one."""

    def __init__(self, model: TrainedModel):
        self._model = model
        self._parameters = model.local_parameters
        self._earlier = EarlierGradients(model.local_parameters)
        self._has_earlier = False

    @contextmanager
    def around(self, function: Any) -> Iterator[None]:
        """Surrounds a step: the gradients of earlier batches are put aside where they must not be divided."""
        self._has_earlier = False
        if torch.is_grad_enabled():
            there = [p.grad for p in self._parameters() if p.grad is not None]
            self._has_earlier = bool(there) and function.weighs_labels is False
            # One that is not finite is left to be found: the update is left out.
            if function.weighs_labels is not False and all(map(_is_finite, there)):
                self._earlier.begin()
        try:
            yield
        finally:
            self._earlier.leave()

    def divide(self, function: Any, weights: Weights, total: float) -> None:
        function.weighs_labels = weights.is_weighted
        if weights.is_weighted and total:
            self._model.labels_of_batch *= 2.0 ** round(log2(total))
        if not total or isclose(total, 1.0, rel_tol=1e-12):
            return
        if self._has_earlier:
            raise UsageError(
                f"{line_of(function)}: this batch is the first whose loss is a mean over labels of which "
                "some do not count, and gradients of earlier batches are there: it cannot be weighed. Call "
                "optimizer.zero_grad() before such a batch."
            )
        gradients = [local_of(own_part(p.grad)) for p in self._parameters() if p.grad is not None]
        if gradients:
            torch._foreach_div_(gradients, total)


def _is_finite(gradient: Tensor) -> bool:
    return bool(local_of(own_part(gradient)).isfinite().all())
