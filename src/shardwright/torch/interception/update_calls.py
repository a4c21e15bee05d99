"""Refuses calls inside a step function that belong to an update of the whole batch.

Such a call would be made once for each microbatch and each trace, and before all gradients are there.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardwright.torch.interception.glue import refuse_inside_step

__all__ = ["refuse_updates_inside_steps"]

_CALLS: dict[type, tuple[str, tuple[str, ...]]] = {
    Optimizer: ("optimizer", ("zero_grad",)),  # for step() there is a hook of PyTorch
    LRScheduler: ("scheduler", ("step",)),
    torch.amp.GradScaler: ("scaler", ("step", "update", "unscale_")),
    nn.Module: ("model", ("zero_grad",)),
}


def refuse_updates_inside_steps(cleanup: ExitStack) -> None:
    """Has optimizers, schedulers and scalers of all classes so far refuse their calls; until the run ends."""
    for base, (spoken, names) in _CALLS.items():
        for kind in {base, *(() if base is nn.Module else _subclasses(base))}:
            for name in names:
                method = vars(kind).get(name)
                if callable(method) and not hasattr(method, "_refuses_inside_steps"):
                    setattr(kind, name, _refusing(method, f"{spoken}.{name}() is called"))
                    cleanup.callback(setattr, kind, name, method)


def _refusing(method: Callable[..., Any], what: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        refuse_inside_step(what, "Call it in the training loop.")
        return method(*args, **kwargs)

    refusing._refuses_inside_steps = True  # type: ignore[attr-defined]
    return refusing


def _subclasses(kind: type) -> Iterator[type]:
    below: type
    for below in kind.__subclasses__():
        yield below
        yield from _subclasses(below)
