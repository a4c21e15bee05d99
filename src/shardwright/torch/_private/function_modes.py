"""Torch function modes, and the transforms of `torch.func`."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

__all__ = [
    "TorchFunctionMode",
    "function_mode_depth",
    "function_transforms_active",
    "outside_of_functions",
    "pop_function_mode",
    "push_function_mode",
]


@contextmanager
def outside_of_functions() -> Iterator[None]:
    """A context in which no `__torch_function__` is called, and no transform of `torch.func` is at work."""
    with torch._C.DisableTorchFunction():
        if torch._C._functorch.maybe_current_level() is None:
            yield
        else:
            with temporarily_clear_interpreter_stack():
                yield


def function_mode_depth() -> int:
    """The number of torch function modes that are active in this thread."""
    return torch._C._len_torch_function_stack()


def push_function_mode(mode: TorchFunctionMode) -> None:
    """Activates a mode without its context manager: coroutines leave and enter in any order."""
    torch._C._push_on_torch_function_stack(mode)


def pop_function_mode() -> TorchFunctionMode:
    """Deactivates the topmost mode and returns it."""
    mode: TorchFunctionMode = torch._C._pop_torch_function_stack()
    return mode


def function_transforms_active() -> bool:
    """Whether `torch.func` (grad, vmap) or forward-mode differentiation is at work, here or further out."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0
