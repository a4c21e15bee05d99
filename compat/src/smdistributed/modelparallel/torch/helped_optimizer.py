"""An optimizer inside of a script's own: ``smp.DistributedOptimizer(FP16_Optimizer(...))``.

Scripts for releases before 1.10 have their own helper for fp16: it makes float32 copies of the parameters
when they are placed, scales the loss, and steps the optimizer inside. Its own ways hold; what belongs to the
library (placing, schedulers) deals with the optimizer inside::

    scheduler, library    ->  HelpedOptimizer  ->  the optimizer inside (param_groups, state)
    step, zero_grad, ...  ->  HelpedOptimizer  ->  the helper  ->  the optimizer inside
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shardwright.torch.glue import refuse_inside_step
from smdistributed.modelparallel.torch.optimizer import DistributedOptimizer

__all__ = ["HelpedOptimizer"]

_REMEDY = "Call it in the training loop."


class HelpedOptimizer(DistributedOptimizer):
    """Wraps a helper around an optimizer.

    Args:
        optimizer: the helper; its attribute ``optimizer`` is the optimizer.

    Attributes:
        helper: the script's own object.
    """

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any):
        self.helper = optimizer
        super().__init__(optimizer.optimizer, *args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        if name in _OF_HELPER:
            found = getattr(object.__getattribute__(self, "helper"), name, None)
            if found is not None:
                return found
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        if name == "helper":
            raise AttributeError(name)
        return getattr(self.helper if hasattr(self.helper, name) else self.optimizer, name)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Has the helper step."""
        refuse_inside_step("optimizer.step() is called", _REMEDY)
        return self.helper.step() if closure is None else self.helper.step(closure)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Has the helper clear gradients."""
        refuse_inside_step("optimizer.zero_grad() is called", _REMEDY)
        self.helper.zero_grad(*args, **kwargs)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Has the helper run the backward of a microbatch."""
        self.helper.backward(loss, *args, **kwargs)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.helper!r})"


# The helper's word counts in these, if it has them.
_OF_HELPER = frozenset(
    (
        "clip_master_grads dynamic_loss_scale fp16_groups init_master_params loss_scale loss_scaler "
        "master_distribution_axis master_is_distributed master_params_created overflow reload_model_params "
        "update_master_grads"
    ).split()
)
