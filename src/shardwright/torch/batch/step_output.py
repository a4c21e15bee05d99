"""The output of a step: one value per microbatch, and ways to reduce them."""

from collections.abc import Iterable, Sequence
from textwrap import shorten
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.torch.pytorch.tree import flatten

__all__ = ["StepOutput", "gather_outputs"]


_ADVICE = (
    "It holds one tensor for each microbatch. Make one of them first: reduce_mean() for a loss, concat() for "
    "what has a row for each sample."
)
_LONGEST_NAMES = 200


class StepOutput:
    """The tensors that a step function returned, one for each microbatch, on every rank.

    Attributes:
        outputs: the tensors, by microbatch.
    """

    def __init__(self, outputs: Sequence[Tensor]):
        self.outputs = list(outputs)

    def reduce_mean(self) -> Tensor:
        """The mean over the microbatches, element by element; shape as one of them."""
        return self.stack().mean(0)

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
        shapes = [tuple(output.shape) for output in self.outputs]
        if len(set(shapes)) > 1:
            raise UsageError(
                f"the microbatches have different shapes {shapes}, so they cannot be combined element by "
                "element. Use concat()."
            )
        return torch.stack(self.outputs, dim)

    def detach(self) -> "StepOutput":
        """The same tensors without autograd history."""
        return StepOutput([output.detach() for output in self.outputs])

    def __len__(self) -> int:
        return len(self.outputs)

    def __getitem__(self, index: int) -> Tensor:
        return self.outputs[index]

    def __getattr__(self, name: str) -> NoReturn:
        # What a tensor has and this has not: item(), float(), backward(), shape, ...
        raise AttributeError(f"StepOutput has no attribute {name}. {_ADVICE}")

    def __format__(self, format_spec: str) -> str:
        if format_spec:
            raise UsageError(f"a StepOutput cannot be written as {format_spec!r}. {_ADVICE}")
        return repr(self)

    def __float__(self) -> float:
        raise UsageError(f"a StepOutput is no number. {_ADVICE}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        # torch.mean(output), and tensor + output.
        name = getattr(func, "__name__", "a function of PyTorch")
        raise UsageError(f"{name}() takes tensors, and a StepOutput is none. {_ADVICE}")

    def _no_operand(self, *_: Any) -> NoReturn:
        raise UsageError(f"a StepOutput is no number, so there are no sums or comparisons. {_ADVICE}")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _no_operand
    __truediv__ = __rtruediv__ = __neg__ = __pow__ = _no_operand
    __lt__ = __le__ = __gt__ = __ge__ = _no_operand

    def __repr__(self) -> str:
        return (
            f"StepOutput({len(self.outputs)} microbatches of {tuple(self.outputs[0].shape)}; "
            "reduce_mean() makes one tensor of them)"
        )


def gather_outputs(results: Sequence[Any]) -> Any:
    """Turns one result a microbatch into one result: tensors become `StepOutput`, other things lists.

    A result that is None in every microbatch stays None. Dictionaries may have their keys in another order in
    each microbatch.

    Raises:
        UsageError: the microbatches have other keys, or lists of other lengths.
    """
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
    return structure.rebuild([_combine(column) for column in columns])


def _by_path(result: Any) -> dict[tuple[Any, ...], Any]:
    items, structure = flatten(result)
    return dict(zip(structure.paths(), items, strict=True))


def _named(paths: Iterable[tuple[Any, ...]]) -> str:
    """What an error says of parts of a result: ``result['loss'][0]``."""
    names = ["result" + "".join(f"[{key!r}]" for key in path) for path in paths]
    return shorten(", ".join(names), _LONGEST_NAMES) if names else "nothing"


def _combine(column: list[Any]) -> Any:
    if all(isinstance(item, Tensor) for item in column):
        return StepOutput(column)
    if all(item is None for item in column):
        return None
    return column
