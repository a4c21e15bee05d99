"""Measures how fast the optimizer updates parameters on the current device."""

import inspect
import logging
import statistics
import time
from inspect import Parameter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Optimizer

from shardwright.run.context import Context

__all__ = ["update_rate"]

log = logging.getLogger(__name__)

_ELEMENTS = 2**21  # with gradients and two states 32 MiB: more than a core's share of the caches
_RUNS = 3


def update_rate(context: Context) -> float:
    """Bytes of parameters that a rank updates a second, while all others do the same; collective.

    The optimizer is the first of the run with its own settings, or AdamW where there is none yet. 0 where it
    cannot be tried, for example because it wants a closure.
    """
    if context.mesh.world_size > 1:
        dist.barrier()
    wrapped = next(iter(context.optimizers), None)
    generator = torch.random.get_rng_state()
    try:
        return _rate(None if wrapped is None else wrapped.optimizer, context.device)
    except Exception as error:  # whatever somebody's optimizer raises without the model that it was made for
        log.info("the optimizer's update cannot be timed (%s): it is estimated by bytes", error)
        return 0.0
    finally:
        torch.random.set_rng_state(generator)


def _rate(like: Optimizer | None, device: torch.device) -> float:
    parameter = nn.Parameter(torch.zeros(_ELEMENTS, device=device))
    parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = AdamW([parameter]) if like is None else type(like)([parameter], **_settings_of(like))
    times = []
    for _ in range(1 + _RUNS):  # the first makes its state
        _wait(device)
        start = time.perf_counter()
        optimizer.step()
        _wait(device)
        times.append(time.perf_counter() - start)
    return parameter.nbytes / statistics.median(times[1:])


def _settings_of(optimizer: Optimizer) -> dict[str, Any]:
    """Its defaults, without those that a base class has put in and its own constructor does not take."""
    taken = inspect.signature(type(optimizer)).parameters.values()
    names = {parameter.name for parameter in taken}
    takes_all = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in taken)
    return {name: value for name, value in optimizer.defaults.items() if takes_all or name in names}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
