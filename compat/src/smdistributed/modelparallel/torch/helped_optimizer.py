"""An optimizer inside of a script's own: ``smp.DistributedOptimizer(FP16_Optimizer(...))``.

Scripts for releases before 1.10 have their own helper for fp16: it makes float32 copies of the parameters
when they are placed, scales the loss, and steps the optimizer inside. Its own ways hold; what belongs to the
library (placing, schedulers) deals with the optimizer inside::

    scheduler, library    ->  HelpedOptimizer  ->  the optimizer inside (param_groups, state)
    step, zero_grad, ...  ->  HelpedOptimizer  ->  the helper  ->  the optimizer inside
"""

from collections.abc import Callable
from itertools import chain
from typing import Any

from torch import Tensor

from shardwright.torch.interception.glue import refuse_inside_step
from smdistributed.modelparallel.torch.optimizer import DistributedOptimizer
from smdistributed.modelparallel.torch.state_mod import current_run

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

    def __setattr__(self, name: str, value: Any) -> None:
        """What the script puts back after loading, such as the loss scale, is the helper's."""
        if name in _OF_HELPER and hasattr(self.helper, name):
            setattr(self.helper, name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "helper":
            raise AttributeError(name)
        return getattr(self.helper if hasattr(self.helper, name) else self.optimizer, name)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Has the helper step."""
        refuse_inside_step("optimizer.step() is called", _REMEDY)
        super()._load_waiting()
        return self.helper.step() if closure is None else self.helper.step(closure)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Has the helper clear gradients."""
        refuse_inside_step("optimizer.zero_grad() is called", _REMEDY)
        self.helper.zero_grad(*args, **kwargs)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Has the helper run the backward of a microbatch."""
        self.helper.backward(loss, *args, **kwargs)

    def init_master_params(self) -> None:
        """Has the helper make its copies in float32; a state that was loaded before is theirs."""
        make = getattr(self.helper, "init_master_params", None)
        if make is not None:
            make()
            super()._load_waiting()

    def _load_waiting(self) -> None:
        # In 16 bits, as parameters are without the copies, what AdamW keeps would go to 0.
        if getattr(self.helper, "master_params_created", True):
            super()._load_waiting()

    # ---- names ----

    def _names_of_model(self) -> dict[int, str]:
        """With those of the copies: a copy has the name of its parameter."""
        names = super()._names_of_model()
        own, copies = (getattr(self.helper, name, ()) for name in ("fp16_groups", "fp32_from_fp16_groups"))
        pairs = zip(chain.from_iterable(own), chain.from_iterable(copies), strict=True) if copies else ()
        return names | {id(copy): names[id(parameter)] for parameter, copy in pairs if id(parameter) in names}

    def _parameter_names(self) -> list[str]:
        return super()._parameter_names() and self._names_here(current_run())

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.helper!r})"


# The helper's word counts in these, if it has them.
_OF_HELPER = frozenset(
    (
        "clip_master_grads dynamic_loss_scale first_closure_call_this_step fp16_groups loss_scale "
        "loss_scaler master_distribution_axis master_is_distributed master_params_created overflow "
        "reload_model_params update_master_grads"
    ).split()
)
