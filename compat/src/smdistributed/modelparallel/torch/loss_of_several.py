"""The loss of a backward of several tensors."""

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor

from shardwright.errors import UsageError
from shardwright.torch.interception.backward_calls import refuse_no_tensor


def as_one(tensors: Sequence[Tensor], gradients: Any) -> Tensor:
    """A number with the gradients that several tensors have together.

    Args:
        gradients: for each, what is trained with respect to it; None for one that is a number.
    """
    given = [gradients] * len(tensors) if gradients is None else list(gradients)
    if len(given) != len(tensors) or not tensors:
        _refuse_lengths(len(tensors), len(given))
    for tensor in tensors:
        refuse_no_tensor(tensor)
    parts = [
        tensor if gradient is None else (tensor * gradient).sum()
        for tensor, gradient in zip(tensors, given, strict=True)
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _refuse_lengths(num_tensors: int, num_gradients: int) -> NoReturn:
    raise UsageError(
        f"model.backward gets {num_tensors} tensors and {num_gradients} gradients. Pass one gradient for "
        "each tensor, or None for those that are numbers; for example model.backward(loss)."
    )
