"""Nodes of autograd, and the backward in progress."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.nn.modules._functions import BackwardHookFunction

__all__ = [
    "BackwardHookFunction",
    "backward_in_progress",
    "behind_inner_backward",
    "call_after_backward",
    "goes_into_gradients",
    "gradient_is_wanted",
    "newest_node",
    "run_backward",
    "running_node",
    "saved_by",
    "shape_behind",
]

_CODE_OF_CUSTOM_BACKWARD = tuple(
    getattr(BackwardCFunction, name).__code__
    for name in ("apply", "apply_boxed")  # torch before 2.13 has no apply_boxed
    if hasattr(BackwardCFunction, name)
)


def newest_node() -> int:
    """The sequence number of the autograd node that this thread made last."""
    return int(torch._C._autograd._get_sequence_nr()) - 1


def running_node() -> int | None:
    """The sequence number of the autograd node whose backward runs; None outside of a backward."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def run_backward(roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """`torch.autograd.backward`, but function modes stay active in Python code that the backward runs."""
    torch.autograd.Variable._execution_engine.run_backward(
        tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def backward_in_progress() -> int:
    """A number for the backward that calls this code: one that is started inside another has its own."""
    return int(torch._C._current_graph_task_id())


def call_after_backward(call: Callable[[], None]) -> None:
    """Has something called when the backward in progress, which calls this code, is over."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def behind_inner_backward() -> list[Any]:
    """Of a backward that a custom function started in its own: nodes that the one around it comes to next.

    Nothing for one that code calling this is in by itself. The gradients that the function gives go to them.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code in _CODE_OF_CUSTOM_BACKWARD:
            return [node for node, _ in frame.f_locals["self"].next_functions if node is not None]
        frame = frame.f_back
    return []


def goes_into_gradients(parameter: torch.Tensor) -> bool:
    """Whether the backward in progress, which calls this code, adds to the gradient of a parameter."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False  # `torch.autograd.grad` asks for it, and returns it


def gradient_is_wanted(node: Any, position: int) -> bool:
    """Whether the backward in progress has a use for the gradient of an input that is a parameter."""
    if not node.needs_input_grad[position]:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node.next_functions[position][0]))
    except RuntimeError:
        return True  # `torch.autograd.grad` asks for this parameter


def saved_by(node: Any, name: str) -> Any:
    """What a node of autograd has saved under a name; None where it has no such thing."""
    return getattr(node, f"_saved_{name}", None)


def shape_behind(node: Any) -> tuple[int, ...] | None:
    """The shape of the tensor that a node of autograd has made, its first; None where it is unknown."""
    metadata = getattr(node, "_input_metadata", None)
    return tuple(metadata[0].shape) if metadata else None
