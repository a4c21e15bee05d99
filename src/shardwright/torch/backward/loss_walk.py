"""Follows autograd's graph from a loss to the rows that it reduces: see `loss_reduction`."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from shardwright.torch._private import FakeTensor, saved_by, shape_behind, storage_key

__all__ = ["LossWalk", "Neither", "Reduction", "Rows", "Term"]


class Reduction(IntEnum):
    """How the losses of microbatches make that of their batch."""

    UNKNOWN = 0  # counted as a mean
    MEAN = 1  # weighed by samples
    WEIGHTED = 2  # weighed by what counts in each
    SUM = 3
    NEITHER = 4


class Rows(Enum):
    """A tensor that is no value of the batch yet."""

    FIXED = 0  # of parameters alone
    ROWS = 1  # as many for each sample
    PICKED = 2  # some of them, by values


@dataclass(frozen=True, slots=True)
class Term:
    """A value of the batch.

    Attributes:
        reduction: of what it is made of.
        shape: of what was summed.
        count: gives how much counts in it; for a weighted mean.
    """

    reduction: Reduction
    shape: tuple[int, ...] = ()
    count: Callable[[], Tensor | float] | None = None


Flow: TypeAlias = "Rows | tuple[Term, ...]"


class Neither(Exception):  # noqa: N818  (no error: an answer)
    """The loss is a function of the whole batch."""


_LINEAR = frozenset(
    "Alias AsStrided Clone Copy Diagonal Expand Neg Permute ReshapeAlias Select Slice Split SplitWithSizes "
    "Squeeze Swapaxes T ToCopy Transpose Unbind UnsafeSplit UnsafeView Unsqueeze View ViewAs NanToNum Where "
    "MaskedFill CopySlices Contiguous Detach".split()
)
_POINTWISE = frozenset(
    "Abs Clamp ClampMax ClampMin Cos Elu Erf Exp Expm1 Gelu Hardtanh LeakyRelu Log Log10 Log1P Log2 "
    "LogSigmoid NativeDropout Pow Reciprocal Relu Rsqrt Sgn Sigmoid Sign Silu Sin Softplus Sqrt Tanh "
    "Threshold Trunc Frac Maximum Minimum Lerp Addcmul Addcdiv Xlogy Atan2 Square Fmax Fmin Rsub".split()
)
_FUSED = frozenset(
    "MseLoss SmoothL1Loss HuberLoss SoftMarginLoss BinaryCrossEntropy BinaryCrossEntropyWithLogits NllLoss "
    "NllLoss2D MultiMarginLoss MultilabelMarginLoss L1Loss KlDiv".split()
)
_PICKS = frozenset("Index IndexSelect MaskedSelect".split())
_PRODUCTS = frozenset("Mm Bmm Addmm Baddbmm Addbmm Cdist Pdist CdistForward PdistForward".split())
# What makes one number, or a few, of all rows, and follows from no sum of theirs.
_OF_ALL = frozenset(
    "Max Min Amax Amin Aminmax Norm LinalgVectorNorm Logsumexp Prod Std Var StdMean VarMean Median Nanmedian "
    "Sort Topk Kthvalue Cummax Cummin Cumprod Mode Renorm".split()
)
_DEEPEST = 60


class LossWalk:
    """Follows autograd's graph backward, from a loss to the rows that it reduces."""

    def __init__(
        self,
        loss: Tensor,
        samples: int,
        constants: Collection[int],
        is_fixed: Callable[[Tensor], bool],
    ):
        self._loss = loss
        self._samples = max(samples, 1)
        self._constants = constants
        self._is_fixed = is_fixed
        self._known: dict[Any, Flow] = {}
        self.unknown = ""

    def flow(self, node: Any, depth: int) -> Flow:
        """What a node has made: rows, or a value of the batch."""
        if node not in self._known:
            self._known[node] = self._flow(node, depth)
        return self._known[node]

    def _flow(self, node: Any, depth: int) -> Flow:
        name = _name_of(node)
        if name == "AccumulateGrad":
            return self._leaf(node.variable)
        if depth > _DEEPEST:
            return Rows.ROWS
        if name in ("Sum", "Mean"):
            return self._reduced(node, name, depth)
        if name in _FUSED:
            return self._fused(node, name, depth)
        if name in _PRODUCTS:
            return self._product(node, name)
        if name in _LINEAR:
            return self._joined(self._children(node, depth))
        if name == "Add" and _is_made_up(node):
            return Rows.ROWS if shape_behind(node) else self._not_known("a module that looks at values")
        if name in ("Add", "Sub", "Stack", "Cat"):
            return self._joined(self._children(node, depth), outer=node)
        if name == "Mul":
            return self._multiplied(node, depth)
        if name == "Div":
            return self._divided(node, depth)
        if name in ("Softmax", "LogSoftmax"):
            return self._normalised(node, depth)
        if name in _POINTWISE:
            return self._bent(self._children(node, depth), name)
        return self._other(node, name, depth)

    def _children(self, node: Any, depth: int) -> list[Flow]:
        return [self.flow(child, depth + 1) for child, _ in node.next_functions if child is not None]

    def _leaf(self, tensor: Tensor) -> Flow:
        if isinstance(tensor, nn.Parameter) or self._is_fixed(tensor):
            return Rows.FIXED
        # What another stage has made: by its shape, rows.
        return Rows.ROWS if tensor.dim() else self._not_known("a value of another stage")

    # ---- linear in what it gets ----

    def _joined(self, flows: Sequence[Flow], outer: Any = None) -> Flow:
        terms = tuple(term for flow in flows if isinstance(flow, tuple) for term in flow)
        others = [flow for flow in flows if isinstance(flow, Rows)]
        if not terms:
            if outer is not None:
                self._refuse_pairs(outer)
            return max(others, key=lambda rows: rows.value) if others else Rows.FIXED
        if all(rows is Rows.FIXED for rows in others):  # a penalty of weights, the same in each microbatch
            return (*terms, *(Term(Reduction.MEAN) for _ in others))
        return self._not_known("rows and values of the whole microbatch together")

    def _multiplied(self, node: Any, depth: int) -> Flow:
        flows = self._children(node, depth)
        moving = [flow for flow in flows if flow is not Rows.FIXED]
        if len(moving) < 2:
            return moving[0] if moving else Rows.FIXED
        if any(isinstance(flow, tuple) for flow in moving):
            raise Neither("it multiplies by a value of the whole batch")
        return self._joined(moving, outer=node)

    def _divided(self, node: Any, depth: int) -> Flow:
        (above, _), (below, _) = node.next_functions
        numerator = Rows.FIXED if above is None else self.flow(above, depth + 1)
        if below is not None:
            denominator = self.flow(below, depth + 1)
            if denominator is Rows.FIXED:
                return numerator
            if isinstance(denominator, tuple) or isinstance(numerator, tuple):
                raise Neither("it divides by a value of the whole batch")
            return self._joined([numerator, denominator], outer=node)
        divisor = saved_by(node, "other")
        if not isinstance(numerator, tuple) or divisor is None:
            return numerator
        return tuple(self._term_divided(term, divisor) for term in numerator)

    def _term_divided(self, term: Term, divisor: Tensor) -> Term:
        """A sum that is divided may be a mean: by its samples, or by what counts of them."""
        if term.reduction is not Reduction.SUM:
            return term
        if divisor.numel() != 1:
            return Term(Reduction.UNKNOWN)
        if _is_number(divisor):
            return Term(Reduction.MEAN) if divisor.item() in self._sizes(term.shape) else term
        if storage_key(divisor) in self._constants:
            return term
        return Term(Reduction.WEIGHTED, count=lambda: self._divisor(divisor))

    def _divisor(self, divisor: Tensor) -> Tensor | float:
        """What counts; nothing where ``sum() / count.clamp(min=1)`` is 0 / 1."""
        nothing = (divisor.detach() == 1) & (self._loss.detach() == 0)
        return _number(torch.where(nothing, 0, divisor.detach()).squeeze())

    def _sizes(self, shape: Sequence[int]) -> set[float]:
        """What a script may divide the sum over rows of a shape by, to have the mean over samples."""
        sizes = {float(self._samples)}
        at = self._batch_dim(shape)
        for dim, size in enumerate(shape):
            sizes |= {known * (size / self._samples if dim == at else size) for known in sizes}
        return sizes

    # ---- from rows to a value of the batch ----

    def _batch_dim(self, shape: Sequence[int]) -> int | None:
        """The dim along which samples lie; None where there is none of such a size."""
        return next((dim for dim, size in enumerate(shape) if size and size % self._samples == 0), None)

    def _reduced(self, node: Any, name: str, depth: int) -> Flow:
        below = self._children(node, depth)[0]
        shape = tuple(saved_by(node, "self_sym_sizes") or ())
        if not shape and below is not Rows.FIXED and not isinstance(below, tuple):
            shape = shape_behind(node.next_functions[0][0]) or ()
        if not isinstance(below, Rows) or below is Rows.FIXED:
            return below
        dims = saved_by(node, "dim")
        chosen = _dims(dims, len(shape)) if dims else set(range(len(shape)))
        at = self._batch_dim(shape) if below is Rows.ROWS else 0
        if at is not None and at not in chosen:
            return below
        if name == "Sum":
            return (Term(Reduction.SUM, shape=shape),)
        if below is Rows.PICKED:
            return (Term(Reduction.WEIGHTED, count=lambda: float(shape[0])),)
        return (Term(Reduction.MEAN),)

    def _fused(self, node: Any, name: str, depth: int) -> Flow:
        flows = self._children(node, depth)
        if any(isinstance(flow, tuple) for flow in flows):
            raise Neither(f"{name} takes a value of the whole batch")
        below = max((flow for flow in flows if isinstance(flow, Rows)), key=lambda rows: rows.value)
        if below is Rows.FIXED:
            return below
        reduction = saved_by(node, "reduction")
        if reduction == 0:
            return below
        shape = shape_behind(node.next_functions[0][0]) or ()
        if name.startswith("NllLoss"):
            shape = (*shape[:1], *shape[2:])  # a label for each row
        if reduction == 2:
            return (Term(Reduction.SUM, shape=shape),)
        if name.startswith("NllLoss"):
            return (Term(Reduction.WEIGHTED, count=lambda: _labels(node)),)
        if below is Rows.PICKED:
            return (Term(Reduction.WEIGHTED, count=lambda: float(prod(shape))),)
        return (Term(Reduction.MEAN),)

    def _normalised(self, node: Any, depth: int) -> Flow:
        shape, dims = shape_behind(node), saved_by(node, "dim")
        if shape and self._samples > 1 and dims is not None:
            (dim,) = _dims((dims,), len(shape))
            if dim == 0 and shape[0] == self._samples:
                raise Neither("a softmax goes over the samples")
        return self._bent(self._children(node, depth), "softmax")

    def _bent(self, flows: Sequence[Flow], name: str) -> Flow:
        """The result of a function that is not linear."""
        if any(isinstance(flow, tuple) for flow in flows):
            raise Neither(f"{name.lower()} of a value of the whole batch is no sum over its samples")
        return self._joined(flows)

    # ---- pairs of samples, and what is not known ----

    def _product(self, node: Any, name: str) -> Flow:
        inputs = [child for child, _ in node.next_functions]
        left, right = self._operands(node, name, inputs)
        if left and right and self._samples > 1:
            shape = shape_behind(node) or ()
            rows = [size for size in shape[-2:] if size % self._samples == 0]
            if len(rows) == 2 and prod(shape[:-2]) % self._samples:
                raise Neither("it compares samples with one another")
            sizes = saved_by(node, "self_sym_sizes") or saved_by(node, "mat1_sym_sizes") or (1,)
            if not rows and sizes[-1] % self._samples == 0:  # as a covariance
                return (Term(Reduction.SUM),)
        if not left and not right:
            return Rows.FIXED
        return Rows.ROWS

    def _operands(self, node: Any, name: str, inputs: Sequence[Any]) -> tuple[bool, bool]:
        """Whether the two operands of a product are of the batch."""
        if name in ("Pdist", "PdistForward"):
            return True, True
        first, second = inputs[-2:] if len(inputs) > 1 else (inputs[0], None)
        names = ("self", "mat2") if name in ("Mm", "Bmm") else ("mat1", "mat2")
        return tuple(
            self._is_of_batch(child, saved_by(node, key))
            for child, key in zip((first, second), names, strict=True)
        )  # type: ignore[return-value]

    def _is_of_batch(self, node: Any, saved: Tensor | None) -> bool:
        if node is not None:
            leaf = node
            while _name_of(leaf) in _LINEAR:
                leaf = leaf.next_functions[0][0]
            return not (_is_leaf(leaf) and self._leaf(leaf.variable) is Rows.FIXED)
        return saved is not None and self._samples in saved.shape and not self._is_fixed(saved)

    def _refuse_pairs(self, node: Any) -> None:
        """Refuses differences between all pairs of samples: ``x[:, None] - x[None]``."""
        shape = shape_behind(node) or ()
        if self._samples < 2 or len(shape) < 2 or shape[0] != self._samples or shape[1] != self._samples:
            return
        shapes = [shape_behind(child) or () for child, _ in node.next_functions if child is not None]
        if len(shapes) == 2 and {tuple(each[:2]) for each in shapes} == {
            (1, self._samples),
            (self._samples, 1),
        }:
            raise Neither("it compares samples with one another")

    def _other(self, node: Any, name: str, depth: int) -> Flow:
        shape = shape_behind(node)
        if name in _PICKS:
            below = self._children(node, depth)
            source = shape_behind(node.next_functions[0][0])
            is_picked = shape is not None and source is not None and shape[:1] != source[:1]
            return Rows.PICKED if is_picked and Rows.ROWS in below else self._joined(below)
        if shape is None:
            return self._not_known(name)
        if shape and self._batch_dim(shape) is not None:
            return Rows.ROWS
        flows = self._children(node, depth)
        if all(flow is Rows.FIXED for flow in flows):
            return Rows.FIXED
        if any(isinstance(flow, tuple) for flow in flows) or name in _OF_ALL:
            raise Neither(f"{name} is taken over the whole batch")
        return self._not_known(name)

    def _not_known(self, what: str) -> tuple[Term, ...]:
        self.unknown = self.unknown or what
        return (Term(Reduction.UNKNOWN),)


def _is_made_up(node: Any) -> bool:
    """Whether a node stands for a module that a trace could not follow (`traced_values.with_history`)."""
    leaves = [child.variable for child, _ in node.next_functions if child is not None and _is_leaf(child)]
    return any(isinstance(x, FakeTensor) and not x.dim() and not isinstance(x, nn.Parameter) for x in leaves)


def _is_leaf(node: Any) -> bool:
    return _name_of(node) == "AccumulateGrad"


def _labels(node: Any) -> Tensor | float:
    """How many labels count, each by the weight of its class."""
    if saved_by(node, "weight") is not None:
        return _number(saved_by(node, "total_weight"))
    ignored = saved_by(node, "ignore_index")
    ignored = ignored - 2**64 if ignored >= 2**63 else ignored
    return _number((saved_by(node, "target") != ignored).sum())


def _name_of(node: Any) -> str:
    """``Mean`` for ``MeanBackward1``."""
    return str(node.name()).rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")


def _dims(dims: Sequence[int], num_dims: int) -> set[int]:
    """Dims as autograd saves them, counted from 0: those below 0 are large there."""
    return {(dim - 2**64 if dim >= 2**63 else dim) % max(num_dims, 1) for dim in dims}


def _is_number(divisor: Tensor) -> bool:
    """Whether a divisor was a number of Python's, and no tensor."""
    if isinstance(divisor, FakeTensor) or divisor.dim():
        return False
    small = {torch.int64: torch.int8, torch.float64: torch.float16}.get(divisor.dtype)
    return small is not None and torch.result_type(divisor, torch.zeros((), dtype=small)) is small


def _number(tensor: Tensor) -> Tensor | float:
    """A number of Python's where nobody waits for it; on a GPU the tensor."""
    return float(tensor.item()) if tensor.device.type == "cpu" else tensor.double()
