"""Operations that give a tensor another shape in place: ``x.transpose_(0, 1)``.

The tensor becomes the view that ``x.transpose(0, 1)`` is; whoever else sees its memory stays as it is.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from shardwright.errors import UsageError
from shardwright.torch._private import change_shape_only
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, wrap

__all__ = ["ReshapedInPlace", "reshapes_in_place"]

_VIEWS = {f"{name}_": name for name in ("as_strided", "squeeze", "t", "transpose", "unsqueeze")}
_OTHER_MEMORY = ("resize_", "resize_as_", "set_", "resize_output_")


def reshapes_in_place(name: str) -> bool:
    """Whether an operator changes the shape, or the memory, of its first argument."""
    return name in _VIEWS or name in _OTHER_MEMORY


class ReshapedInPlace:
    """Makes a tensor a view of what it was."""

    fast = None

    def __init__(self, func: Any, name: str):
        if name in _OTHER_MEMORY:
            self.run = self._refuse  # type: ignore[method-assign]
        else:
            self._view = getattr(torch.ops.aten, _VIEWS[name])
        self._func = func

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the operation; all ranks of the group do so."""
        tensor: DividedTensor = args[0]
        before = wrap(tensor._local, tensor._spec)
        before._seen = tensor._seen
        if tensor._spec.copied:
            before._copy = tensor._copy
        view = self._view(before, *args[1:], **kwargs)
        change_shape_only(self._func, args, kwargs)
        for each in tensor.alike():  # its aliases keep their shape
            each._seen = True
        tensor._local, tensor._spec = view._local, view._spec
        if view._spec.copied:
            tensor._copy = view._copy
        return tensor

    def _refuse(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NoReturn:
        tensor = args[0]
        if not isinstance(tensor, DividedTensor):
            raise UsageError(
                f"{self._func} cannot give an ordinary tensor the memory of one that ranks share."
            )
        raise UsageError(
            f"{self._func} would give a tensor of shape {tuple(tensor.shape)} other memory, but "
            f"{tensor._spec.group.num_ranks} ranks share it. Make a new tensor, or keep this parameter whole."
        )
