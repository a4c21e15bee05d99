"""Follows autograd's graph from a loss to the rows that it reduces: see `loss_reduction`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isclose, prod
from typing import Any

from torch import Tensor, nn

from shardwright.torch._private.modules import saved_by, shape_behind
from shardwright.torch._private.tensors import FakeTensor, unset_fake_temporarily
from shardwright.torch.backward.loss_terms import (
    Flow,
    Neither,
    Reduction,
    Rows,
    Term,
    dims_of,
    is_leaf,
    is_number,
    labels_of,
    name_of_node,
    number_in,
)

_LINEAR = frozenset(
    "Alias AsStrided Clone Copy Diagonal Expand Neg Permute ReshapeAlias Select Slice Split SplitWithSizes "
    "Squeeze Swapaxes T ToCopy Transpose Unbind UnsafeSplit UnsafeView Unsqueeze View ViewAs NanToNum Where "
    "MaskedFill CopySlices Contiguous Detach _Placed".split()
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
_PARTS = frozenset("Select Slice Split SplitWithSizes Unbind UnsafeSplit".split())
_PRODUCTS = frozenset(
    "Mm Bmm Addmm Baddbmm Addbmm Cdist Pdist CdistForward PdistForward EuclideanDist".split()
)
# What takes rows of a weight by the numbers in a batch.
_LOOKUPS = _PICKS | frozenset("Embedding EmbeddingBag Gather Take GridSampler2D GridSampler3D".split())
# What joins rows of a dim with others of it, and gives as many.
_ALONG = frozenset("Cumsum Flip LogCumsumExp Logcumsumexp Roll".split())
# What makes one number, or a few, of all rows, and follows from no sum of theirs.
_OF_ALL = frozenset(
    "Max Min Amax Amin Aminmax Norm LinalgVectorNorm Logsumexp Prod Std Var StdMean VarMean Median Nanmedian "
    "Sort Topk Kthvalue Cummax Cummin Cumprod Mode Renorm Dist".split()
)
_DEEPEST = 60


class LossWalk:
    """Follows autograd's graph backward, from a loss to the rows that it reduces."""

    def __init__(
        self,
        loss: Tensor,
        samples: int,
        is_constant: Callable[[Tensor], bool],
        is_fixed: Callable[[Tensor], bool],
        is_count: Callable[[Tensor], bool],
        products: dict[Any, list[bool]],
    ):
        self._loss = loss
        self._samples = max(samples, 1)
        self._is_constant = is_constant
        self._is_fixed = is_fixed
        self._is_count = is_count
        self._known: dict[Any, Flow] = {}
        self._weights: dict[Any, bool] = {}
        self._products = products
        self.unknown = ""
        self.guesses = False
        self.divides_by_count = False
        self.of_number = ""

    def flow(self, node: Any, depth: int) -> Flow:
        """What a node has made: rows, or a value of the batch."""
        if node not in self._known:
            self._known[node] = self._flow(node, depth)
        return self._known[node]

    def _parts(self, node: Any, depth: int) -> list[Flow]:
        """The children of a sum; one that is neither (a loss that balances experts) is a term of it."""
        found: list[Flow] = []
        for child, _ in node.next_functions:
            if child is not None:
                try:
                    found.append(self.flow(child, depth + 1))
                except Neither as answer:
                    self._known[child] = (Term(Reduction.NEITHER, reason=str(answer)),)
                    found.append(self._known[child])
        return found

    def _flow(self, node: Any, depth: int) -> Flow:
        name = name_of_node(node)
        if name == "AccumulateGrad":
            return self._leaf(node.variable)
        if depth > _DEEPEST:
            return Rows.ROWS
        if name in ("Sum", "Nansum", "Mean"):
            return self._reduced(node, name, depth)
        if name == "Dot":
            return self._dotted(node, depth)
        if name == "_ChunkedLoss":
            return self._chunked(node, depth)
        if name in _FUSED:
            return self._fused(node, name, depth)
        if name in _PRODUCTS:
            return self._product(node, name, depth)
        if name in _PARTS and self._takes_samples(node) and Rows.FIXED not in self._children(node, depth):
            return self._not_known(f"{name} of single samples")
        if name in _LINEAR:
            return self._joined(self._children(node, depth))
        if name == "Add" and _is_made_up(node):
            self.guesses = True
            return Rows.ROWS if shape_behind(node) else self._not_known("a module that looks at values")
        if name in ("Add", "Sub", "Stack", "Cat"):
            return self._joined(self._parts(node, depth), outer=node)
        if name == "Mul":
            return self._multiplied(node, depth)
        if name == "Div":
            return self._divided(node, depth)
        if name in ("Softmax", "LogSoftmax"):
            return self._normalised(node, depth)
        if name in _POINTWISE:
            return self._bent(self._children(node, depth), name)
        if name in _ALONG and self._samples > 1 and self._goes_over_samples(node):
            if all(flow is Rows.FIXED for flow in self._children(node, depth)):
                return Rows.FIXED
            raise Neither("it compares samples with one another")
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
        others = [flow for flow in flows if isinstance(flow, Rows)]
        if len(others) == len(flows):
            if outer is not None:
                self._refuse_pairs(outer)
            return max(others, default=Rows.FIXED)
        terms = tuple(term for flow in flows if isinstance(flow, tuple) for term in flow)
        if all(rows is Rows.FIXED for rows in others):  # a penalty of weights, the same in each microbatch
            return (*terms, *(Term(Reduction.MEAN, is_fixed=True) for _ in others))
        return self._not_known("rows and values of the whole microbatch together")

    def _multiplied(self, node: Any, depth: int) -> Flow:
        flows = self._children(node, depth)
        moving = [flow for flow in flows if flow is not Rows.FIXED]
        if len(moving) < 2:
            self._look_at_factor(node, moving)
            return moving[0] if moving else Rows.FIXED
        if any(_is_unknown(flow) for flow in moving):
            return self._not_known("a product")
        if any(isinstance(flow, tuple) for flow in moving):
            raise Neither("it multiplies by a value of the whole batch")
        return self._joined(moving, outer=node)

    def _look_at_factor(self, node: Any, moving: Sequence[Flow]) -> None:
        """Notes that a mean is multiplied by a number that may be that of its samples."""
        factor = saved_by(node, "other")
        is_mean = [
            isinstance(flow, tuple) and all(t.reduction is Reduction.MEAN for t in flow) for flow in moving
        ]
        if self._samples < 2 or not any(is_mean) or not isinstance(factor, Tensor) or not is_number(factor):
            return
        with unset_fake_temporarily():
            if float(factor) == self._samples:
                self.of_number = (
                    f"the number {self._samples}, by which it multiplies a mean over as many samples"
                )

    def _divided(self, node: Any, depth: int) -> Flow:
        above = node.next_functions[0][0]
        below = node.next_functions[1][0] if len(node.next_functions) > 1 else None
        numerator = Rows.FIXED if above is None else self.flow(above, depth + 1)
        if below is not None:
            denominator = self.flow(below, depth + 1)
            if denominator is Rows.FIXED:
                return numerator
            if _is_unknown(denominator) or _is_unknown(numerator):
                return self._not_known("a quotient")
            if isinstance(denominator, tuple) or isinstance(numerator, tuple):
                raise Neither("it divides by a value of the whole batch")
            return self._joined([numerator, denominator], outer=node)
        divisor = saved_by(node, "other")
        if not isinstance(numerator, tuple) or divisor is None:
            return numerator
        num_sums = sum(term.reduction is Reduction.SUM for term in numerator)  # of layers, say
        return tuple(self._term_divided(term, divisor, num_sums) for term in numerator)

    def _term_divided(self, term: Term, divisor: Tensor | float, num_sums: int) -> Term:
        """A sum that is divided may be a mean: by its samples, or by what counts of them."""
        if term.reduction is not Reduction.SUM:
            is_count = isinstance(divisor, FakeTensor) and not self._is_constant(divisor)
            self.divides_by_count |= is_count and term.reduction is Reduction.UNKNOWN
            return term
        if isinstance(divisor, Tensor) and divisor.numel() != 1:
            return Term(Reduction.UNKNOWN)
        if not isinstance(divisor, Tensor) or is_number(divisor):
            with unset_fake_temporarily():
                by = float(divisor)
            sizes = self._sizes(term.shape)
            is_size = any(isclose(by, size * factor) for size in sizes for factor in {1, num_sums})
            if not is_size and abs(by) <= max(prod(term.shape), 1):
                raise Neither(
                    f"it divides a sum over samples by the number {by:g}, which may count what is in this "
                    'microbatch ("mean"), or in the whole batch ("sum")'
                )
            return Term(Reduction.MEAN) if is_size else replace(term, divisor=by)
        if self._is_constant(divisor):
            return term
        is_here = isinstance(divisor, FakeTensor) or self._is_count(divisor)
        if not is_here and abs(number_in(divisor)) > max(prod(term.shape), 1):
            return term  # more than there is in this microbatch: a number of the whole batch
        return Term(Reduction.WEIGHTED, count=lambda: self._divisor(divisor))

    def _divisor(self, divisor: Tensor) -> float:
        """What counts; nothing where ``sum() / count.clamp(min=1)`` is 0 / 1."""
        count = number_in(divisor)
        return 0.0 if count == 1 and number_in(self._loss) == 0 else count

    def _takes_samples(self, node: Any) -> bool:
        """Whether a node takes some of the samples alone: ``for x, y in zip(out, labels)``."""
        source = node.next_functions[0][0]
        shape = shape_behind(source) if source is not None else None
        if not shape or shape[0] % self._samples:
            return False
        dim = saved_by(node, "dim")
        return name_of_node(node) == "Unbind" or (dim is not None and dims_of((dim,), len(shape)) == {0})

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
        chosen = dims_of(dims, len(shape)) if dims else set(range(len(shape)))
        at = self._batch_dim(shape) if below is Rows.ROWS else 0
        if at is not None and at not in chosen:
            return below
        if name != "Mean":
            return (Term(Reduction.SUM, shape=shape),)
        if below is Rows.PICKED:
            return (Term(Reduction.WEIGHTED, count=lambda: float(shape[0])),)
        return (Term(Reduction.MEAN),)

    def _fused(self, node: Any, name: str, depth: int) -> Flow:
        flows = self._children(node, depth)
        rows = [flow for flow in flows if isinstance(flow, Rows)]
        if len(rows) < len(flows):
            if any(map(_is_unknown, flows)):
                return self._not_known(name)
            raise Neither(f"{name} takes a value of the whole batch")
        below = max(rows)
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
            return (Term(Reduction.WEIGHTED, count=lambda: labels_of(node)),)
        if below is Rows.PICKED:
            return (Term(Reduction.WEIGHTED, count=lambda: float(prod(shape))),)
        return (Term(Reduction.MEAN),)

    def _chunked(self, node: Any, depth: int) -> Flow:
        """A loss of logits that are computed piece by piece: a sum over labels, or a mean."""
        rows = node.next_functions[0][0]
        below = Rows.ROWS if rows is None else self.flow(rows, depth + 1)  # None: only the head is trained
        if not isinstance(below, Rows):
            raise Neither("a head takes a value of the whole batch")
        if below is Rows.FIXED or node.reduction == 0:
            return below
        if node.reduction == 2:
            return (Term(Reduction.SUM, shape=node.rows),)
        return (Term(Reduction.WEIGHTED, count=lambda: float(node.count)),)

    def _normalised(self, node: Any, depth: int) -> Flow:
        shape, dims = shape_behind(node), saved_by(node, "dim")
        if shape and self._samples > 1 and dims is not None:
            (dim,) = dims_of((dims,), len(shape))
            if dim == 0 and shape[0] == self._samples:
                raise Neither("a softmax goes over the samples")
        return self._bent(self._children(node, depth), "softmax")

    def _bent(self, flows: Sequence[Flow], name: str) -> Flow:
        """The result of a function that is not linear."""
        if all(isinstance(flow, Rows) for flow in flows):
            return self._joined(flows)
        if any(map(_is_unknown, flows)):
            return self._not_known(name)
        raise Neither(f"{name.lower()} of a value of the whole batch is no sum over its samples")

    # ---- pairs of samples, and what is not known ----

    def _product(self, node: Any, name: str, depth: int) -> Flow:
        inputs = [child for child, _ in node.next_functions]
        if "dist" in name.lower() and any(isinstance(flow, tuple) for flow in self._children(node, depth)):
            raise Neither("it compares samples with values of the whole batch")
        shape = shape_behind(node) or ()
        rows = [size for size in shape[-2:] if size % self._samples == 0]
        if self._samples == 1 or len(rows) == 1 or prod(shape[:-2]) % self._samples == 0 < len(shape) - 2:
            return Rows.ROWS  # as of a layer
        # That an operand is no weight shows deep in the model: looked for once, not in each microbatch.
        key = depth, name, *(child and name_of_node(child) for child in inputs[-2:])
        if (weights := self._products.get(key)) is None:
            weights = self._products[key] = [self._is_weight(child) for child in inputs[-2:]]
        if any(weights):  # a layer, or a product of weights
            return Rows.FIXED if len(weights) > 1 and all(weights) else Rows.ROWS
        left, right = self._operands(node, name, inputs, depth)
        if left and right:
            if len(rows) == 2 and self._has_samples(node, name, inputs):
                raise Neither("it compares samples with one another")
            if self._contracted(node, inputs[-2]) % self._samples == 0:  # as a covariance
                return (Term(Reduction.SUM),)
        if not left and not right:
            return Rows.FIXED
        return Rows.ROWS if rows else self._not_known(f"{name} over the samples")

    def _contracted(self, node: Any, left: Any) -> int:
        """The size of the dim over which a product sums; 1 where it is not known."""
        sizes = saved_by(node, "self_sym_sizes") or saved_by(node, "mat1_sym_sizes")
        if sizes is None and left is not None:
            sizes = shape_behind(left)
        return sizes[-1] if sizes else 1

    def _dotted(self, node: Any, depth: int) -> Flow:
        """The sum of a product of two vectors, which may be all rows one behind the other."""
        flows = self._children(node, depth)
        if any(isinstance(flow, tuple) for flow in flows):
            return self._not_known("Dot")
        if all(flow is Rows.FIXED for flow in flows):
            return Rows.FIXED
        shapes = [shape_behind(child) for child, _ in node.next_functions if child is not None]
        shape = next((each for each in shapes if each), (1,))
        return (
            (Term(Reduction.SUM, shape=shape),) if shape[0] % self._samples == 0 else self._not_known("Dot")
        )

    def _operands(self, node: Any, name: str, inputs: Sequence[Any], depth: int) -> tuple[bool, bool]:
        """Whether the two operands of a product are of the batch."""
        if name in ("Pdist", "PdistForward"):
            return True, True
        first, second = inputs[-2:] if len(inputs) > 1 else (inputs[0], None)
        return tuple(
            self._is_of_batch(child, node, key, depth)
            for child, key in zip((first, second), _keys(name), strict=True)
        )  # type: ignore[return-value]

    def _is_weight(self, node: Any, depth: int = 0) -> bool:
        """Whether a node gives a parameter of the model, or a weight that is computed of parameters alone."""
        if node is None or depth > _DEEPEST:
            return False
        if node not in self._weights:
            self._weights[node] = self._is_computed_weight(node, name_of_node(node), depth)
        return self._weights[node]

    def _is_computed_weight(self, node: Any, name: str, depth: int) -> bool:
        if name == "AccumulateGrad":
            return self._leaf(node.variable) is Rows.FIXED
        inputs = [child for child, _ in node.next_functions]
        known = [child for child in inputs if child is not None]
        if name in _LOOKUPS or not known or not all(self._is_weight(child, depth + 1) for child in known):
            return False
        if len(known) == len(inputs) or name in ("Mv", "Dot", "Vdot"):
            return True
        if name in _PRODUCTS:
            pairs = zip(inputs[-2:], _keys(name), strict=False)
            return not any(self._is_data(node, key) for child, key in pairs if child is None)
        # What has no gradient may be samples, unless a weight has given the shape; or a frozen weight, of
        # which some rows are trained: tokens of PEFT.
        shape = shape_behind(node) or ()
        return shape in map(shape_behind, known) or (name == "IndexCopy" and len(shape) == 2)

    def _is_of_batch(self, child: Any, node: Any, key: str, depth: int) -> bool:
        if child is not None:
            return self.flow(child, depth + 1) is not Rows.FIXED
        return self._is_data(node, key)

    def _is_data(self, node: Any, key: str) -> bool:
        """Whether a node has been given what is of the batch, without a gradient."""
        saved = saved_by(node, key)  # only here: what a checkpoint has saved would be computed again
        return saved is not None and not self._is_fixed(saved)

    def _has_samples(self, node: Any, name: str, inputs: Sequence[Any]) -> bool:
        """Whether an operand without a gradient has as many rows or columns as there are samples."""
        if name in ("Pdist", "PdistForward") or None not in inputs[-2:]:
            return True
        pairs = zip(inputs[-2:], _keys(name), strict=True)
        saved = [saved_by(node, key) for child, key in pairs if child is None]
        return any(each is not None and self._samples in each.shape for each in saved)

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
            return Rows.PICKED if Rows.ROWS in below else self._joined(below)
        if shape is None:
            return self._not_known(name)
        is_rows = bool(shape) and self._batch_dim(shape) is not None
        if is_rows and name not in _OF_ALL:
            return Rows.ROWS
        flows = self._children(node, depth)
        if all(flow is Rows.FIXED for flow in flows):
            return Rows.FIXED
        if is_rows and not self._goes_over_samples(node):
            return Rows.ROWS
        if any(_is_unknown(flow) for flow in flows):
            return self._not_known(name)
        if name in _OF_ALL:
            raise Neither(f"{name} is taken over the whole batch")
        return self._not_known(name)

    def _goes_over_samples(self, node: Any) -> bool:
        """Whether an operation along a dim has that of the samples: ``losses.topk(k)``."""
        shape = shape_behind(node.next_functions[0][0]) or ()
        dims = saved_by(node, "dim") if saved_by(node, "dim") is not None else saved_by(node, "dims")
        dims = (dims,) if isinstance(dims, int) else dims
        if not dims or not shape:
            return False
        return self._batch_dim(shape) in dims_of(dims, len(shape))

    def _not_known(self, what: str) -> tuple[Term, ...]:
        self.unknown = self.unknown or what
        return (Term(Reduction.UNKNOWN),)


def _is_unknown(flow: Flow) -> bool:
    """Whether nothing is known of a value."""
    return isinstance(flow, tuple) and all(term.reduction is Reduction.UNKNOWN for term in flow)


def _is_made_up(node: Any) -> bool:
    """Whether a node stands for a module that a trace could not follow (`traced_values.with_history`)."""
    leaves = [child.variable for child, _ in node.next_functions if child is not None and is_leaf(child)]
    return any(isinstance(x, FakeTensor) and not x.dim() and not isinstance(x, nn.Parameter) for x in leaves)


def _keys(name: str) -> tuple[str, str]:
    """Under which names a product saves its operands."""
    return ("self", "mat2") if name in ("Mm", "Bmm") else ("mat1", "mat2")
