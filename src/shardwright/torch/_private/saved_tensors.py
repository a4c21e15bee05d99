"""The hooks for tensors that autograd saves."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

__all__ = [
    "gradient_transform_active",
    "put_saved_tensor_hooks",
    "saved_tensor_hooks",
    "take_saved_tensor_hooks",
    "transforms_beside_hooks",
]


@contextmanager
def transforms_beside_hooks() -> Iterator[None]:
    """Inside, `torch.func` (grad, vjp, jacrev) puts hooks for saved tensors aside; PyTorch refuses them.

    What is counted with such hooks is not seen there, but the code runs.
    """
    refuse = torch.autograd.graph.disable_saved_tensors_hooks

    @contextmanager
    def put_aside(error_message: str) -> Iterator[None]:
        taken = take_saved_tensor_hooks()
        try:
            with refuse(error_message):
                yield
        finally:
            put_saved_tensor_hooks(taken)

    torch.autograd.graph.disable_saved_tensors_hooks = put_aside
    try:
        yield
    finally:
        torch.autograd.graph.disable_saved_tensors_hooks = refuse


def gradient_transform_active() -> bool:
    """Whether one of `torch.func` that takes gradients (grad, vjp, jacrev, hessian) is at work.

    They refuse hooks for saved tensors meanwhile.
    """
    return not torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]


def saved_tensor_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The innermost hooks for saved tensors (pack, unpack) that are in force in this thread, if any."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else (hooks[0], hooks[1])


def take_saved_tensor_hooks() -> list[Any]:
    """Removes the hooks that `torch.autograd.graph.saved_tensors_hooks` has installed in this thread."""
    taken: list[Any] = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(False)) is not None:
        taken.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    return taken[::-1]


def put_saved_tensor_hooks(hooks: Sequence[Any]) -> None:
    """Installs what `take_saved_tensor_hooks` removed."""
    for pack, unpack in hooks:
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
