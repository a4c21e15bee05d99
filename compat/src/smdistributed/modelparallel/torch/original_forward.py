"""``super()._orig_forward(...)``: how scripts call the forward of a class above their own.

In SageMaker's library ``super().forward(...)`` inside of a forward recursed, and this was the way around.
Here both work. The name is given to classes above one that uses it, and to no others.
"""

from types import FunctionType
from typing import Any

from torch import nn

_NAME = "_orig_forward"


def keep_original_forwards(model: nn.Module) -> None:
    """Has each class above one that calls ``super()._orig_forward`` know its forward by that name."""
    for kind in {type(module) for module in model.modules()}:
        if any(_uses_it(function) for each in kind.__mro__ for function in vars(each).values()):
            for each in kind.__mro__:
                if each is not nn.Module and "forward" in vars(each) and _NAME not in vars(each):
                    setattr(each, _NAME, vars(each)["forward"])


def _uses_it(function: Any) -> bool:
    return isinstance(function, FunctionType) and _NAME in function.__code__.co_names
