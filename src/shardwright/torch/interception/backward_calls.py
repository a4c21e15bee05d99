"""Routes ``torch.autograd.backward(loss)`` in a step function to ``model.backward(loss)``.

PyTorch does not show this call to function modes. Unintercepted, it would run through only the part of the
graph on this rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.torch.interception.glue import active_handler, plain_torch
from shardwright.torch.pytorch.functions import gradient_of_backward

__all__ = ["backward_intercepted"]


@contextmanager
def backward_intercepted() -> Iterator[None]:
    """Has `torch.autograd.backward` go to the active handler."""
    original = torch.autograd.backward

    def backward(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: Any = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        handler = active_handler()
        if handler is None:
            original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
            return
        roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        if len(roots) != 1:
            raise UsageError(
                f"torch.autograd.backward is called with {len(roots)} tensors in a step function. Add the "
                "losses and call model.backward(loss) once."
            )
        given = grad_tensors if isinstance(grad_tensors, Tensor | None) else grad_tensors[0]
        gradient = gradient_of_backward(given, retain_graph, create_graph, inputs)
        with plain_torch():
            handler.backward(roots[0], gradient)

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = original
