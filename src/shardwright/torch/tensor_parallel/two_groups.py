"""Operations on parameters of experts, which all ranks of a grid share, and on others, which fewer share."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shardwright.torch.pytorch.functions import (
    map_arguments,
    one_by_one,
    takes_several,
    written_tensors,
)
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, whole

__all__ = ["OfTwoGroups"]


class OfTwoGroups:
    """Runs an operation on tensors of two groups: each pair of lists by itself, others with whole tensors."""

    fast = None

    def __init__(self, func: Any):
        self._func = func

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the operation; all ranks of the grid do so."""
        func = self._func
        if takes_several(func) and len(args[0]) > 1:
            return one_by_one(func, args, dict(kwargs))
        keeps_experts = any(map(_is_of_expert, written_tensors(func, args, kwargs)))

        def in_one_group(tensor: Tensor) -> Tensor:
            is_kept = not isinstance(tensor, DividedTensor) or _is_of_expert(tensor) == keeps_experts
            return tensor if is_kept else whole(tensor)

        own_args, own_kwargs = map_arguments(in_one_group, args, kwargs)
        return func(*own_args, **own_kwargs)


def _is_of_expert(tensor: Tensor) -> bool:
    return isinstance(tensor, DividedTensor) and tensor._spec.group.grid is not None
