"""Statistics of a batch's data that a loss is computed with, and that no graph of autograd shows.

::

    advantage = (r - r.mean()) / r.std()          each microbatch has its own mean
    loss = -(log_probability * advantage).mean()

    mixed = a * x + (1 - a) * x[torch.randperm(len(x))]     pairs of one microbatch

Numbers without gradients are marked where an operation goes over the samples, and followed to the operation
that joins them with what is trained. A sum alone is none: ``(l * mask).sum() / mask.sum()`` is weighed by it.
Another order of the samples is found where it is taken, and the nearest ones by a matrix of pairs; not that
of a sort, which goes by the samples alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwright.torch._private.tensors import TorchFunctionMode, storage_key
from shardwright.torch.interception.glue import refuse_gradient_inside_step
from shardwright.torch.interception.step_code import in_step_code
from shardwright.torch.pytorch.functions import OF_GRADIENT, is_metadata
from shardwright.torch.pytorch.modules import user_line
from shardwright.torch.pytorch.tree import leaves

_OVER_ROWS = frozenset(
    "amax amin log_softmax logsumexp max mean median min norm normalize quantile softmax std std_mean var "
    "var_mean vector_norm".split()
)
_DIM_COMES_THIRD = frozenset("norm normalize quantile vector_norm".split())
_COUNTS = frozenset("bincount count_nonzero sum".split())
_KEPT_ABOVE = frozenset("clamp clamp_ clamp_min clip max maximum".split())
_DRAW_ROWS = frozenset("randint randperm".split())
_NEAREST = frozenset("argmax argmin max min topk".split())
_TAKE_ROWS = frozenset("__getitem__ index_select take_along_dim gather".split())


class BatchData:
    """Follows statistics of one microbatch.

    Attributes:
        found: what a loss is computed with, and where; empty without.
        is_clamped: a sum over the samples is kept above a number: ``mask.sum().clamp(min=1)``.
    """

    def __init__(self, samples: int, is_trained: Callable[[Tensor], bool]):
        self.found = ""
        self.is_clamped = False
        self._samples = samples
        self._is_trained = is_trained
        self._statistics: dict[int, tuple[Tensor, str]] = {}  # with the tensor, which must not go away
        self._counts: dict[int, Tensor] = {}
        self._drawn: dict[int, Tensor] = {}  # numbers of samples
        self._nearest: dict[int, Tensor] = {}  # of each sample, the nearest other one

    def operation(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Looks at an operation of a step function."""
        name = getattr(func, "__name__", "")
        if self.found:
            return
        self._other_order(name, args, kwargs, result)
        if self.found:
            return
        given = [item for item in leaves((args, kwargs)) if isinstance(item, Tensor)]
        if not given:
            return
        made = [item for item in leaves(result) if isinstance(item, Tensor)]
        marks = [self._statistics[id(item)][1] for item in given if id(item) in self._statistics]
        if len(given) == 1 and self._goes_over_samples(name, args, kwargs):
            if name in _COUNTS:
                self._counts.update({id(item): item for item in made})
            elif self._samples > 1 and given[0].is_floating_point():
                marks.append(f"{name}() over the samples of its data ({user_line()})")
        elif not marks and any(id(item) in self._counts and not self._is_trained(item) for item in given):
            if self._samples > 1 and self._joins_rows(
                given
            ):  # weights / weights.sum(), or losses * weights / weights.sum()
                marks.append(f"a sum over the samples of its data ({user_line()})")
            elif not any(map(self._is_trained, given)):
                self.is_clamped |= name in _KEPT_ABOVE
                self._counts.update({id(item): item for item in made})
        if not marks:
            return
        both = self._statistics.keys() | self._counts.keys()
        free = [item for item in given if id(item) in both and not self._is_trained(item)]
        if free and any(map(self._is_trained, given)):
            self.found = marks[0]
        self._statistics.update({id(item): (item, marks[0]) for item in made})

    def is_count(self, tensor: Tensor) -> bool:
        """Whether a number has been counted in the data: how many labels, or the sum of weights."""
        return storage_key(tensor) in {storage_key(each) for each in self._counts.values()}

    def _other_order(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Looks whether samples are put in another order, to be paired with others of their microbatch."""
        if name in _DRAW_ROWS:
            numbers = [item for item in (*args, *kwargs.values()) if type(item) is int]
            if self._samples in numbers[:2] and isinstance(result, Tensor):
                self._drawn[id(result)] = result
            return
        of = args[0] if args else None
        if not isinstance(of, Tensor) or not of.dim():
            return
        if name in _NEAREST and self._samples > 1 and of.shape == (self._samples, self._samples):
            made = (item for item in leaves(result) if isinstance(item, Tensor) and item.dtype == torch.int64)
            self._nearest.update({id(item): item for item in made})
        if id(of) in self._drawn and name not in _TAKE_ROWS:  # permutation.to(device)
            self._drawn.update({id(item): item for item in leaves(result) if isinstance(item, Tensor)})
        if of.shape[0] != self._samples:
            return
        takes = name in _TAKE_ROWS and self._takes_drawn(args, kwargs, of)
        if takes or self._turns(name, of, args, kwargs):
            self.found = f"another order of its samples ({user_line()})"

    def _turns(self, name: str, of: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the samples go round: ``x.flip(0)``, ``x.roll(1, 0)``."""
        at = {"flip": 1, "roll": 2}.get(name)
        if at is None or self._samples < 2:
            return False
        dims = kwargs.get("dims", args[at] if len(args) > at else None)
        return dims is None or dims in (0, (0,), [0], -of.dim())

    def _takes_drawn(self, args: Sequence[Any], kwargs: Mapping[str, Any], of: Tensor) -> bool:
        """Whether rows are taken by numbers that were drawn, or by a list of them in another order."""
        at = kwargs.get("index", args[-1])
        at = at[0] if isinstance(at, tuple) and at else at
        if isinstance(at, Tensor):  # a table may have as many rows as there are samples
            is_near = id(at) in self._nearest and self._is_trained(of) and not isinstance(of, nn.Parameter)
            return is_near or id(at) in self._drawn
        numbers = at.tolist() if isinstance(at, np.ndarray) else at
        rows = list(range(self._samples))
        if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
            return False
        return numbers != rows and sorted(numbers) == rows

    def _joins_rows(self, given: Sequence[Tensor]) -> bool:
        """Whether one of some tensors has rows of samples; the others are sums over them."""
        others = [item for item in given if item.dim() and id(item) not in self._counts]
        return any(
            item.shape[0] == self._samples or (item.shape[0] % self._samples == 0 and self._is_trained(item))
            for item in others
        )

    def _goes_over_samples(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether an operation joins the samples of the tensor that it is given first."""
        if name not in _OVER_ROWS | _COUNTS or not args or not isinstance(args[0], Tensor):
            return False
        of = args[0]
        if not of.dim() or of.shape[0] % self._samples:
            return False
        if name == "bincount":
            return True
        if name not in _COUNTS and of.shape[0] != self._samples and not self._is_trained(of):
            return False  # no rows: weights of classes
        at = 2 if name in _DIM_COMES_THIRD else 1
        dims = kwargs.get("dim", kwargs.get("axis", args[at] if len(args) > at else None))
        if dims is None or isinstance(dims, bool):
            return name != "normalize"
        dims = (dims,) if not isinstance(dims, tuple | list) else dims
        return any(isinstance(dim, int) and dim % of.dim() == 0 for dim in dims)


class WatchedData(TorchFunctionMode):
    """Follows a step function that runs as it is, on one rank.

    Attributes:
        is_behind_backward: its gradients are not those of the batch yet, and nobody may use them.
    """

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.is_behind_backward: Callable[[], bool] = lambda: False
        self.data = BatchData(samples, lambda tensor: tensor.requires_grad)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_gradient = func in OF_GRADIENT and isinstance(args[0], nn.Parameter)
        if is_gradient and in_step_code() and self.is_behind_backward():
            refuse_gradient_inside_step()
        result = func(*args, **(kwargs or {}))
        if in_step_code() and not is_metadata(func):
            self.data.operation(func, args, kwargs or {}, result)
        return result
