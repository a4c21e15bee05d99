"""Tells step-function code from model code, whichever of the model's modules is called.

::

    x = model.module.wte(ids)      a unit                 its call goes to the handler as it is
    x = model.module.body(x)       has units inside       what runs between them is code of the model
    x = model.module.head(x)       has parameters         no unit, where no trace has come by
    x = model.module.double(x)     has neither            code of the step function, as x * 2 is
    loss = model(batch, labels)    the model itself       code of the step function, where its own code reads
                                                          values: the losses of detection in transformers
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from shardwright.torch.interception.glue import active_handler, has_units_inside
from shardwright.torch.interception.step_code import code_of_model, in_step_code
from shardwright.torch.pytorch.module_tree import all_modules

__all__ = ["model_calls_marked"]


@contextmanager
def model_calls_marked(model: nn.Module, *, but_its_own: bool = False) -> Iterator[None]:
    """Tells the active handler when a `ReadingStep` calls a module of the model, and what it gave."""
    original = nn.Module.__call__
    own: set[int] = set()

    def is_of_model(module: nn.Module) -> bool:
        if has_units_inside(module):
            return True
        if not own:
            own.update(map(id, all_modules(model)))
        return id(module) in own and any(True for _ in module.parameters())

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        handler = active_handler()
        if handler is None or not in_step_code() or not is_of_model(module):
            return original(module, *args, **kwargs)
        if but_its_own and model in (module, *module.children()):
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
