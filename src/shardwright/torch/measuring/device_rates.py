"""Measures how fast ranks exchange and compute tensors, and how fast the optimizer updates."""

import inspect
import logging
import statistics
import time
from collections.abc import Callable
from functools import partial
from inspect import Parameter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Optimizer

from shardwright.comm.joining.process_group import tell_all
from shardwright.placement import WHOLE, Cut, PartialSum
from shardwright.plan import TensorPrices
from shardwright.run.context import Context
from shardwright.run.machine import UpdateCosts, seconds_of, seconds_of_products
from shardwright.torch.tensor_parallel.divide import tensor_group
from shardwright.torch.tensor_parallel.divided_tensor import divided
from shardwright.torch.tensor_parallel.group import Prices
from shardwright.torch.tensor_parallel.redistribution import replaced
from shardwright.torch.tensor_parallel.search.dry_run import DividedOperations
from shardwright.torch.tensor_parallel.search.recording import group_without_ranks

_SMALL, _LARGE = 64, 512 * 1024
"""Elements of 4 bytes: little more than a latency, and the activations of a layer."""

_MOVED = 8 * 2**20
"""Elements that no cache holds."""

_RUNS = 9
_PRODUCT_FLOPS = {"cpu": 2 * 512**3, "cuda": 2 * 4096**3}


def measured_prices(context: Context) -> TensorPrices:
    """The prices of the tensor-parallel groups; collective over all ranks, which all get the same."""
    group, device = tensor_group(context.groups.tensor), context.device
    small, large = (torch.zeros(size, device=device) for size in (_SMALL, _LARGE))

    def sums(data: torch.Tensor) -> Callable[[], Any]:
        # As the run does it: with the copy that is added up, in memory of its own.
        given: Any = {"shape": data.shape, "strides": data.stride(), "source": PartialSum(), "target": WHOLE}
        return partial(replaced, group, data, **given)

    latency_s = _seconds(sums(small), device)
    bytes_s = max(_seconds(sums(large), device) - latency_s, 1e-9)
    moved = torch.zeros(_MOVED, device=device)
    moved_s = _seconds(lambda: moved.add_(1), device)
    mine = [latency_s, bytes_s, seconds_of_products(device), moved_s]
    latency_s, bytes_s, products_s, moved_s = (
        statistics.median(column) for column in zip(*tell_all(mine), strict=True)
    )
    num_ranks = context.mesh.share
    return TensorPrices(
        latency_s=latency_s,
        bandwidth_Bps=2 * (num_ranks - 1) / num_ranks * large.nbytes / bytes_s,
        flops_per_s=_PRODUCT_FLOPS[device.type] / products_s,
        memory_Bps=2 * moved.nbytes / moved_s,
    )


def measured_operation_s(context: Context) -> float:
    """Seconds that an operation on divided tensors takes beyond its own; collective over all ranks.

    In a step, large products push the code of the dispatch out of the caches, so that it takes several times
    what it takes in a loop of its own.
    """
    with torch.inference_mode(False), torch.enable_grad():  # the first step may be an evaluation
        operation_s = _operation_s(context.device)
    return float(statistics.median(tell_all(operation_s)))


def _operation_s(device: torch.device) -> float:
    """The same on this rank."""
    group = group_without_ranks(0, 2, Prices())
    matrix = torch.zeros(512, 512, device=device)
    whole, weight = torch.ones(4, 8, device=device), torch.ones(8, 8, device=device, requires_grad=True)
    part = divided(torch.ones(8, 8, device=device), Cut.even(0, 8, num_ranks=2), group)
    with DividedOperations() as count:
        _some_operations(part, weight)
    taken: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(2 * _RUNS):
        for is_part, tensor in ((True, part), (False, whole)):
            torch.mm(matrix, matrix)
            start = time.perf_counter()
            _some_operations(tensor, weight)
            taken[is_part].append(time.perf_counter() - start)
    more_s = statistics.median(taken[True][2:]) - statistics.median(taken[False][2:])
    return float(max(more_s, 0.0) / count.number)


def _some_operations(tensor: torch.Tensor, weight: torch.Tensor) -> None:
    """Those that a layer is made of, forward and backward, too small for their work to count."""
    x = torch.relu(torch.mm(tensor, weight))
    x = x.view(-1, 2, 4).transpose(1, 2).transpose(1, 2).reshape(-1, 8) + 1.0
    weight.grad = None
    torch.autograd.backward(x, torch.ones_like(x))


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """The median of some calls, which all ranks begin together."""
    dist.barrier()
    return statistics.median(seconds_of(call, device, runs=_RUNS))


log = logging.getLogger(__name__)

_ELEMENTS = 2**21  # with gradients and two states 32 MiB: more than a core's share of the caches
_FEW_ELEMENTS, _SOME, _MANY = 64, 8, 64
_UPDATES = 3


def update_costs(context: Context) -> UpdateCosts:
    """How fast a rank updates parameters, while all others do the same; collective.

    The optimizer is the first of the run with its own settings, or AdamW where there is none yet. All is 0
    where it cannot be tried, for example because it wants a closure.
    """
    if context.mesh.world_size > 1:
        dist.barrier()
    wrapped = next(iter(context.optimizers), None)
    generator = torch.random.get_rng_state()
    try:
        like = None if wrapped is None else wrapped.optimizer
        (large,) = parameters = [_parameter(_ELEMENTS, context.device)]
        rate = large.nbytes / _update_s(parameters, like)
        some, many = (
            _update_s([_parameter(_FEW_ELEMENTS, context.device) for _ in range(number)], like)
            for number in (_SOME, _MANY)
        )
        return UpdateCosts(bytes_a_second=rate, parameter_s=max(many - some, 0.0) / (_MANY - _SOME))
    except Exception as error:  # whatever somebody's optimizer raises without the model that it was made for
        log.info("the optimizer's update cannot be timed (%s): it is estimated by bytes", error)
        return UpdateCosts()
    finally:
        torch.random.set_rng_state(generator)


def _parameter(num_elements: int, device: torch.device) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(num_elements, device=device))
    parameter.grad = torch.full_like(parameter, 1e-3)
    return parameter


def _update_s(parameters: list[nn.Parameter], like: Optimizer | None) -> float:
    """The least of some updates: what else runs on the machine is no part of it."""
    optimizer = AdamW(parameters) if like is None else type(like)(parameters, **_settings_of(like))
    # The first makes its state.
    return min(seconds_of(lambda: optimizer.step(), parameters[0].device, runs=_UPDATES))


def _settings_of(optimizer: Optimizer) -> dict[str, Any]:
    """Its defaults, without those that a base class has put in and its own constructor does not take."""
    taken = inspect.signature(type(optimizer)).parameters.values()
    names = {parameter.name for parameter in taken}
    takes_all = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in taken)
    return {name: value for name, value in optimizer.defaults.items() if takes_all or name in names}
