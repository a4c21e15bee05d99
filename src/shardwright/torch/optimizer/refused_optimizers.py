"""Refuses optimizers: unwrapped ones, of foreign parameters, coupled over stages.

No optimizer may step inside a step function, wrapped or not. Outside, an unwrapped one is checked before its
step: its updates must not differ from what the settings ask for.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from shardwright.comm.message_names import Purpose
from shardwright.errors import UsageError
from shardwright.run.context import Context, context, is_initialized
from shardwright.torch.interception.glue import refuse_inside_step
from shardwright.torch.model.distributed_model import DistributedModel, wrapped_model
from shardwright.torch.optimizer.optimizer_trial import (
    ELEMENTWISE,
    coupled_around,
    is_coupled,
    refuse_coupling,
    refuse_parts_of_the_world,
)


def refuse_foreign_parameters(own: Sequence[nn.Parameter], parameters: Iterable[nn.Parameter]) -> None:
    """Refuses an optimizer of another model, or of a copy; on several ranks, of more than the model."""
    of_model = {id(parameter) for parameter in parameters}
    others = [parameter for parameter in own if id(parameter) not in of_model]
    if own and len(others) == len(own):
        raise UsageError(
            f"the optimizer has {len(own)} parameters, and the wrapped model has none of them, so "
            "nothing would be trained: they belong to another model, or to a copy. Make the optimizer "
            "from the model that is wrapped, for example torch.optim.AdamW(model.parameters(), lr=3e-4)."
        )
    if others and context().mesh.world_size > 1:
        raise UsageError(
            f"{len(others)} of the {len(own)} parameters of the optimizer are not the wrapped model's "
            f"(one has shape {tuple(others[0].shape)}), so each rank would train a copy of its own, or "
            "none. Register them, or the module that has them (a loss), in the module that is wrapped: "
            "net.loss = loss_module, before sw.DistributedModel(net). A step function calls it as before."
        )


def has_stages() -> bool:
    """Whether ranks of a replica have some parameters each."""
    return is_initialized() and context().mesh.pipeline > 1


class UpdatesOverStages:
    """Looks at the methods of an optimizer that may need all parameters."""

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self._groups: list[Sequence[nn.Parameter]] = []
        self._is_harmless = False

    def note_new_groups(self) -> None:
        """Writes down the parameters of new groups, before this rank drops those of other ranks."""
        self._groups += [list(group["params"]) for group in self._optimizer.param_groups[len(self._groups) :]]

    def refuse_coupled_step(self) -> None:
        """Refuses an optimizer whose `step` needs all parameters, or cannot be tried; on all ranks alike."""
        current = context() if is_initialized() else None
        if self._is_harmless or current is None or current.links.replica is None or not has_stages():
            return
        model = wrapped_model()
        if model is None or not model.partitioned:
            return
        coupled = is_coupled(self._optimizer, groups=self._groups or None, if_unknown=True)
        if self._any_rank(coupled, current):
            refuse_coupling(self._optimizer)
        self._is_harmless = True

    def method(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method that may update, such as `first_step` of SAM."""

        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            if is_coupled(self._optimizer, name, groups=self._groups or None, arguments=(args, kwargs)):
                refuse_coupling(self._optimizer)
            return method(*args, **kwargs)

        return run

    def _any_rank(self, here: bool, current: Context) -> bool:
        assert current.links.replica is not None
        row = torch.tensor([float(here)], dtype=torch.float64, device=current.device)
        return bool(current.links.replica.gather(row, Purpose.UPDATE).any())


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


def leaves_update_out(model: DistributedModel | None) -> bool:
    """Whether the gradients of the last step are not finite, and the settings leave such updates out."""
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
    if leaves_update_out(model):
        for parameter in found:
            parameter.grad = None  # which leaves it as it is
    elif model.replicas.updated_parts is not None or context().config.optimizer_state != "as_is":
        raise UsageError(
            f"{type(optimizer).__name__} is not wrapped, and with bf16, fp16, shard_optimizer_state, "
            "offload_optimizer or optimizer_state the library decides what is updated. Call step() of "
            "sw.DistributedOptimizer(optimizer)."
        )
