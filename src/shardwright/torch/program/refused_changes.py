"""Refuses a unit's in-place change in a microbatch if the trace had none.

Other stages would continue with the unchanged tensor (see `shardwright.runtime.dataflow`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import TraceMismatchError
from shardwright.torch.pytorch.functions import name_of_call
from shardwright.torch.pytorch.tree import flatten

__all__ = ["refusing_changes"]


def refusing_changes(
    call: Callable[..., Any], unit: nn.Module, allowed: frozenset[int], *, line: str, microbatch: int
) -> Callable[..., Any]:
    """Has a call of a unit raise where it changes other arguments than those allowed."""

    def refusal() -> TraceMismatchError:
        return TraceMismatchError(
            f"{line}: {name_of_call(unit)} changes an argument in place in microbatch {microbatch}, but not "
            "in the trace, so other stages would go on with the tensor as it was. Change a copy inside the "
            "module (x = x.clone()), or choose by torch.where, and return it."
        )

    def watched(*args: Any, **kwargs: Any) -> Any:
        tensors = [
            (item, item._version)
            for position, item in enumerate(flatten((args, kwargs))[0])
            if isinstance(item, Tensor) and position not in allowed and not item.is_inference()
        ]
        try:
            result = call(*args, **kwargs)
        except RuntimeError as error:
            # Autograd refuses it by itself for a tensor of another stage, which is a leaf here.
            if torch.is_grad_enabled() and "leaf Variable that requires grad" in str(error):
                raise refusal() from error
            raise
        if any(item._version != version for item, version in tensors):
            raise refusal()
        return result

    return watched
