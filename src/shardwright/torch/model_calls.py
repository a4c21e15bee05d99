"""Tells code of a step function from code of the model, whichever of its modules the step function calls.

::

    x = model.module.wte(ids)      a unit                 its call goes to the handler as it is
    x = model.module.body(x)       has units inside       what runs between them is code of the model
    x = x * 2                                             code of the step function
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from shardwright.torch.glue import active_handler, has_units_inside
from shardwright.torch.step_code import code_of_model, in_step_code

__all__ = ["model_calls_marked"]


@contextmanager
def model_calls_marked() -> Iterator[None]:
    """Tells the active handler when a `ReadingStep` calls a module with units inside, and what it gave."""
    original = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        handler = active_handler()
        if handler is None or not in_step_code() or not has_units_inside(module):
            return original(module, *args, **kwargs)
        handler.model_begins()
        with code_of_model():
            result = original(module, *args, **kwargs)
        handler.model_returned(result)
        return result

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]
