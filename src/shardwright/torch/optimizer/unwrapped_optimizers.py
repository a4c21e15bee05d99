"""Checks unwrapped optimizers of the script before they step.

No optimizer may step inside a step function, wrapped or not. Outside, an unwrapped one is checked before its
step: its updates must not differ from what the settings ask for.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from shardwright.errors import UsageError
from shardwright.torch.interception.glue import refuse_inside_step
from shardwright.torch.model.distributed_model import wrapped_model
from shardwright.torch.optimizer.coupling import (
    ELEMENTWISE,
    coupled_around,
    is_coupled,
    refuse_coupling,
    refuse_parts_of_the_world,
)

__all__ = [
    "ADVICE_FOR_CLOSURES",
    "leaves_update_out",
    "needs_closure",
    "refuse_optimizers_inside_steps",
    "stepping",
]


ADVICE_FOR_CLOSURES = (
    "Leave it unwrapped, and train by replicas alone (pipeline_parallel_degree 1): its closure calls the "
    "step function, and returns the mean of the loss over all replicas (dist.all_reduce), so that all decide "
    "alike. "
    "Over stages, take an optimizer whose step() needs no closure, such as torch.optim.AdamW."
)


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether `step` cannot be called without one, as that of LBFGS."""
    kind: Any = type(optimizer)
    return _step_needs_closure(kind)


@cache
def _step_needs_closure(kind: Any) -> bool:
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def refuse_optimizers_inside_steps() -> RemovableHandle:
    """Has every optimizer refuse to step inside a step function, also one that is not wrapped."""

    def refuse(optimizer: Optimizer, *_: Any) -> None:
        refuse_inside_step("optimizer.step() is called", "Call it in the training loop.")
        _look_at(optimizer)

    handle: RemovableHandle = register_optimizer_step_pre_hook(refuse)
    return handle


def leaves_update_out() -> bool:
    """Whether the gradients of the last step are not finite, and the settings leave such updates out."""
    model = wrapped_model()
    return model is not None and model.step_end.finiteness.leaves_out


class _Stepping:
    wrapped = False


@contextmanager
def stepping() -> Iterator[None]:
    """Says that a wrapped optimizer steps."""
    before, _Stepping.wrapped = _Stepping.wrapped, True
    try:
        yield
    finally:
        _Stepping.wrapped = before


def _look_at(optimizer: Optimizer) -> None:
    """Keeps an optimizer of the model from updating other things than the settings ask for."""
    model = wrapped_model()
    if model is None or _Stepping.wrapped:
        return
    own = {id(parameter) for parameter in model.get_module().parameters()}
    found = [p for group in optimizer.param_groups for p in group["params"] if id(p) in own]
    if not found:
        return
    is_first = model.step_end.note(optimizer)
    if type(optimizer) not in ELEMENTWISE:
        refuse_parts_of_the_world(optimizer, wrapped=False)
    is_joint = type(optimizer) not in ELEMENTWISE and is_coupled(optimizer)
    needs_all = optimizer if is_joint else coupled_around(optimizer, sys._getframe(1)) if is_first else None
    if needs_all is not None:
        refuse_coupling(needs_all, ADVICE_FOR_CLOSURES if needs_closure(needs_all) else "")
    if leaves_update_out():
        for parameter in found:
            parameter.grad = None  # which leaves it as it is
    elif model.replicas.updated_parts is not None:
        raise UsageError(
            f"{type(optimizer).__name__} is not wrapped, and with bf16, fp16 or shard_optimizer_state the "
            "library decides what is updated. Call step() of sw.DistributedOptimizer(optimizer)."
        )
