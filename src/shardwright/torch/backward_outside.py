"""A model of one stage that is called outside of steps: nothing would sum the gradients of its backward."""

from typing import Any

from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.torch._private import goes_into_gradients
from shardwright.torch.source_line import user_line
from shardwright.torch.tree import leaves

__all__ = ["refuse_backward_of"]


def refuse_backward_of(result: Any, module: nn.Module) -> None:
    """Has a backward through what a module gave refused where it would reach a parameter.

    Args:
        result: what the module gave, outside of a step.
        module: the module.
    """

    def refuse(gradient: Tensor) -> None:
        if any(p.requires_grad and goes_into_gradients(p) for p in module.parameters()):
            raise UsageError(
                f"{user_line()}: loss.backward() is outside of a step, where replicas do not sum their "
                "gradients and would come apart. Call the model and model.backward(loss) inside a function "
                "decorated with @sw.step."
            )

    for leaf in leaves(result):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            leaf.register_hook(refuse)  # type: ignore[no-untyped-call]
