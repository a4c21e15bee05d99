"""How fast the optimizer updates parameters on the present device."""

import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Optimizer

from shardwright.torch.context import Context

__all__ = ["update_rate"]

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
    except Exception:  # whatever somebody's optimizer raises without the model that it was made for
        return 0.0
    finally:
        torch.random.set_rng_state(generator)


def _rate(like: Optimizer | None, device: torch.device) -> float:
    parameter = nn.Parameter(torch.zeros(_ELEMENTS, device=device))
    parameter.grad = torch.full_like(parameter, 1e-3)
    kind, settings = (AdamW, {}) if like is None else (type(like), like.defaults)
    optimizer = kind([parameter], **settings)
    times = []
    for _ in range(1 + _RUNS):  # the first makes its state
        _wait(device)
        start = time.perf_counter()
        optimizer.step()
        _wait(device)
        times.append(time.perf_counter() - start)
    return parameter.nbytes / statistics.median(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
