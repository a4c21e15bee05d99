"""Deferred tensors, whose data is on another rank: shape, type and device, no data."""

from typing import Any, NoReturn

import torch

from shardwright.errors import DeferredReadError
from shardwright.model_graph import TensorSpec
from shardwright.torch._private.tensors import disabled_torch_function, make_wrapper
from shardwright.torch.interception.glue import active_handler, plain_torch
from shardwright.torch.interception.step_code import in_step_code

REMEDY = (
    "Return the tensor from the step function and read it from the StepOutput, "
    "or compute it inside a module that is placed as a whole."
)
REMEDY_IN_HOOK = (
    "It is read in a forward hook. Keep the tensor in an attribute of the module there, module.seen = "
    "output.detach().mean(), and return module.seen from the step function: it is known on every rank then, "
    "for each microbatch."
)


class DeferredTensor(torch.Tensor):
    """A placeholder for a value that some stage computes.

    Inside a step function every operation on it is looked up in the program of this rank (see `glue.py`):
    it is done here on real data, or it is another rank's business and gives another deferred tensor.
    Outside, it can be asked for its shape, dtype and device, and nothing else.
    """

    value: int

    # Metadata is answered by C++ directly; operations that are not intercepted end in __torch_dispatch__.
    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, like: torch.Tensor, value: int) -> "DeferredTensor":
        """Makes a stand-in with the metadata of `like`."""
        deferred: DeferredTensor = make_wrapper(cls, like)
        deferred.value = value
        return deferred

    def __init__(self, like: torch.Tensor, value: int) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        name = getattr(func, "overloadpacket", func).__name__
        raise DeferredReadError(
            f"{name}() was applied to a tensor whose data is on another rank, outside of the step function "
            f"or in a place that cannot be deferred. {REMEDY}"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        handler = active_handler()
        if handler is not None and in_step_code():
            with plain_torch():
                text: str = handler.operation(torch.Tensor.__repr__, (self,), {})
                return text
        # A script that prints its loss inside the step sees this on the ranks that do not compute it.
        return f"DeferredTensor(shape={tuple(self.shape)}, dtype={self.dtype}, its value is on another rank)"

    def __format__(self, format_spec: str) -> str:
        handler = active_handler()
        if handler is not None and in_step_code():
            with plain_torch():
                text: str = handler.operation(torch.Tensor.__format__, (self, format_spec), {})
                return text
        return repr(self)


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Shape and type of a tensor as plain data."""
    return TensorSpec(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        num_bytes=tensor.numel() * tensor.element_size(),
        requires_grad=tensor.requires_grad,
    )
