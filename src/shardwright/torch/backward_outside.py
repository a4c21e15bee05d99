"""A model of one stage that is called outside of steps: nothing would sum the gradients of its backward.

Parameters tell of such a backward. What the model returned could not: the loss may be an attribute of the
model, or inside an object of the script's, and what reentrant checkpointing computes again has a backward of
its own.
"""

import weakref
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from shardwright.errors import UsageError
from shardwright.torch._private import goes_into_gradients
from shardwright.torch.glue import batch_is_running
from shardwright.torch.source_line import user_line

__all__ = ["BackwardWatch", "refuse_backward_outside"]


class BackwardWatch:
    """Tells when a backward outside of steps comes to a parameter of a model, whose gradient it would change.

    Args:
        reached: called then, for each parameter, before its gradient is changed.
    """

    def __init__(self, reached: Callable[[], None]):
        self._reached = reached
        self._watched: dict[int, weakref.ref[nn.Parameter]] = {}

    def watch(self, module: nn.Module) -> None:
        """Watches the parameters that a module has now, from now on."""
        for parameter in module.parameters():
            known = self._watched.get(id(parameter))
            if parameter.requires_grad and (known is None or known() is not parameter):
                self._watched[id(parameter)] = own = weakref.ref(parameter)
                hook = unserializable_hook(partial(self._on_gradient, own))  # type: ignore[no-untyped-call]
                parameter.register_hook(hook)  # type: ignore[no-untyped-call]

    def _on_gradient(self, own: "weakref.ref[nn.Parameter]", gradient: Tensor) -> None:
        parameter = own()
        if not batch_is_running() and parameter is not None and goes_into_gradients(parameter):
            self._reached()


def refuse_backward_outside() -> None:
    """Refuses a backward outside of steps.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        f"{user_line()}: loss.backward() is outside of a step, where replicas do not sum their gradients and "
        "would come apart. Call the model and model.backward(loss) inside a function decorated with @sw.step."
    )
