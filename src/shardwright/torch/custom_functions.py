"""Functions with a backward of their own (`torch.autograd.Function`) between units: a call is one operation.

PyTorch does not offer these calls to function modes. Unnoticed, the operations inside the forward would be
taken for those of the step function, and a tensor from inside, without the function's backward, be sent.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from shardwright.torch.glue import active_handler, plain_torch

__all__ = ["custom_functions_intercepted"]


@contextmanager
def custom_functions_intercepted() -> Iterator[None]:
    """Has `apply` of every custom function go to the active handler."""
    kind: Any = torch.autograd.Function
    original = kind.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        function = MethodType(original.__func__, cls)
        handler = active_handler()
        if handler is not None and cls is CheckpointFunction:
            # Units called inside would run without gradients: the other kind gives the same.
            run, preserve, *rest = args
            return checkpoint(run, *rest, use_reentrant=False, preserve_rng_state=preserve)
        if handler is None or cls.__module__.startswith("torch."):
            return function(*args, **kwargs)
        with plain_torch():
            return handler.operation(function, args, kwargs)

    kind.apply = classmethod(apply)
    try:
        yield
    finally:
        kind.apply = original
