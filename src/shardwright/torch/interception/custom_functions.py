"""Treats a call of a `torch.autograd.Function` between units as one operation.

PyTorch does not show these calls to function modes. Unintercepted, the operations inside the forward would
pass for the step function's own, and a tensor from inside would be sent without the function's backward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from shardwright.errors import UsageError
from shardwright.torch._private import BackwardHookFunction
from shardwright.torch.interception.glue import active_handler, plain_torch
from shardwright.torch.pytorch.source_line import user_line

__all__ = ["custom_functions_intercepted"]


# Their backward calls collectives, too.
_WITH_MESSAGES = ("torch.distributed.nn.functional", "torch.nn.modules._functions")


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
        if handler is not None and cls is BackwardHookFunction:
            raise UsageError(
                f"{user_line()}: this calls a module that has a backward hook (register_full_backward_hook "
                "or register_full_backward_pre_hook), and whose parts are placed one by one: no rank would "
                "have all the gradients that the hook is given. Register it on modules inside that are "
                "placed whole (`shardwright plan` lists them as units), or register hooks on tensors: "
                "y.register_hook(...)."
            )
        if handler is None or (cls.__module__.startswith("torch.") and cls.__module__ not in _WITH_MESSAGES):
            return function(*args, **kwargs)
        with plain_torch():
            return handler.operation(function, args, kwargs)

    kind.apply = classmethod(apply)
    try:
        yield
    finally:
        kind.apply = original
