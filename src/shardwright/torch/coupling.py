"""Whether an optimizer's update of a parameter depends on other parameters.

The ranks of a pipeline have some parameters each. An optimizer that treats every parameter by itself does not
notice. One that takes a norm, or a step size, over all of them (Prodigy, D-Adaptation, LAMB that clips, SAM)
would make another update on each rank, and another one than for the whole model.

One that says ``sums_over_stages = True`` adds up over the ranks by itself (`gradient_norm`), and is right.
Any other unknown optimizer is tried before its first update, on small parameters: two copies of it make some
steps, which differ in the gradients of all parameters but the first. Where the first one comes out otherwise,
parameters are coupled. Where a number of the groups does, and the parameter does not, the optimizer leaves
there what concerns one parameter alone, as Adafactor of timm does: ranks may have different ones. Where no
copy can make a step (it wants a closure, or the model), a warning says so.

An optimizer may also deal its parameters out to all ranks, and gather what they have made of them (Muon): in
the `step` of a wrapped one that goes over the replicas of a stage (`replica_collectives`).
"""

import contextlib
import copy
import logging
import warnings
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.errors import UsageError
from shardwright.torch.context import context, is_initialized
from shardwright.torch.glue import plain_torch
from shardwright.torch.python_random import python_random_kept
from shardwright.torch.replica_collectives import num_collectives, over_replicas
from shardwright.torch.tree import leaves

__all__ = ["Trial", "refuse_coupling", "refuse_parts_of_the_world", "trial"]

_STEPS = 10
_LEAST_RATE = 1.0
_OTHERS = 2  # parameters in each group beside its first
_MOST_PER_DIM = 4

log = logging.getLogger(__name__)

_trials: "WeakKeyDictionary[Optimizer, dict[str, Trial]]" = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Trial:
    """What was found out of an optimizer.

    Attributes:
        couples: the update of a parameter depends on other parameters.
        numbers: names of numbers in the groups that depend on the gradients of some parameter.
        collects: it calls collectives of `torch.distributed`.
        failure: why nothing was found out; empty where it was.
    """

    couples: bool = False
    numbers: tuple[str, ...] = ()
    collects: bool = False
    failure: str = ""


def refuse_coupling(optimizer: Optimizer, method: str = "step") -> None:
    """Refuses an optimizer whose updates need all parameters, where this rank has some.

    Args:
        optimizer: the script's own.
        method: by which it changes parameters.

    Raises:
        UsageError: the model is spread over stages, and parameters are coupled. On all ranks alike.
    """
    if not is_initialized() or context().mesh.pipeline == 1:
        return
    if getattr(optimizer, "sums_over_stages", False):
        return
    is_first = method not in _trials.get(optimizer, {})
    found = _trial_of(optimizer, method)
    if found.failure and is_first and not type(optimizer).__module__.startswith("torch.optim."):
        log.warning(
            "%s could not be tried on small parameters (%s). If it updates each parameter by what it knows "
            "of all (a step size, a norm of all gradients), ranks of a pipeline, which have those of their "
            "own stages, make other updates than for the whole model: then train by replicas alone "
            "(pipeline_parallel_degree 1).",
            type(optimizer).__name__,
            found.failure,
        )
    if found.couples:
        because = f" (by {', '.join(found.numbers)} in its groups)" if found.numbers else ""
        raise UsageError(
            f"{type(optimizer).__name__} updates each parameter by what it knows of all{because}, and each "
            "rank of a pipeline has those of its own stages: it would make other updates than for the whole "
            "model. Nothing was updated. Train by replicas alone (pipeline_parallel_degree 1; with "
            "sharded_data_parallel_degree they share the memory), or with an optimizer that treats each "
            "parameter by itself. If it clips by a norm of all gradients, turn that off, and call "
            "torch.nn.utils.clip_grad_norm_, which counts those of all stages."
        )
    model = context().model
    if found.numbers and model is not None:
        model.step_end.numbers.let_differ(optimizer, found.numbers)


def refuse_parts_of_the_world(optimizer: Optimizer, *, wrapped: bool) -> None:
    """Refuses an optimizer that deals its work out to all ranks, where these have other parameters.

    Args:
        optimizer: the script's own.
        wrapped: its collectives go over the ranks with the same parameters.

    Raises:
        UsageError: it would get the parameters of other stages, or parts of them.
    """
    if not is_initialized() or max(context().mesh.pipeline, context().mesh.shard) == 1:
        return
    if getattr(optimizer, "sums_over_stages", False):
        return
    what = type(optimizer).__name__
    if any(isinstance(value, dist.ProcessGroup) for value in vars(optimizer).values()):
        raise UsageError(
            f"{what} has a process group of its own and shares its work among those ranks, and ranks of a "
            "pipeline, or of sharded data parallelism, have other parameters. Nothing was updated. Take the "
            "optimizer that is in it: what replicas share of its state says shard_optimizer_state."
        )
    if not wrapped and _trial_of(optimizer, "step").collects:
        raise UsageError(
            f"{what} calls torch.distributed in its step, over all ranks, and these have other parameters. "
            "Nothing was updated. Call step() of sw.DistributedOptimizer(optimizer): there such calls go "
            "over the replicas of a stage."
        )


def _trial_of(optimizer: Optimizer, method: str) -> Trial:
    """Tries it once."""
    found = _trials.setdefault(optimizer, {})
    if method not in found:
        found[method] = trial(optimizer, method)
    return found[method]


def trial(optimizer: Optimizer, method: str = "step") -> Trial:
    """Tries an optimizer.

    Nothing is found where it cannot be tried, as it needs a closure or sparse gradients.

    >>> trial(torch.optim.AdamW([nn.Parameter(torch.ones(2))]))
    Trial(couples=False, numbers=(), collects=False, failure='')
    """
    failure = ""
    for dtype in (torch.float64, torch.float32):  # a small learning rate shows in the first
        with (
            plain_torch(),
            over_replicas(sends=False),
            python_random_kept(),
            warnings.catch_warnings(),
            torch.random.fork_rng(devices=_devices(optimizer)),
        ):
            warnings.simplefilter("ignore")
            calls_before = num_collectives()
            try:
                first, numbers = _steps_of_copy(optimizer, method, dtype, others=1.0)
                again, other_numbers = _steps_of_copy(optimizer, method, dtype, others=-0.2)
            except Exception as error:  # whatever it raises on parameters that it was not made for
                failure = failure or f"{type(error).__name__}: {error}"
                continue
        differing = (name for name, value in numbers.items() if str(value) != str(other_numbers.get(name)))
        alike = torch.allclose(first, again, rtol=0.0, atol=0.0, equal_nan=True)
        return Trial(not alike, tuple(differing), num_collectives() > calls_before)
    inside = [trial(value) for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    return next((found for found in inside if found.couples), Trial(failure=failure))


def _steps_of_copy(
    optimizer: Optimizer, method: str, dtype: torch.dtype, *, others: float
) -> tuple[Tensor, dict[str, Any]]:
    """What becomes of the first parameter, and of the numbers of the groups.

    Args:
        optimizer: of which a copy is made.
        method: called in each step.
        dtype: of the parameters.
        others: how far the gradients of the other parameters keep to a direction, in every step.
    """
    torch.manual_seed(0)
    groups = [_small_group(group, dtype) for group in optimizer.param_groups]
    made = _small_copy(optimizer, groups)
    parameters = [parameter for group in groups for parameter in group["params"]]
    directions = [torch.randn_like(parameter) for parameter in parameters]
    for _ in range(_STEPS):
        for parameter, direction in zip(parameters, directions, strict=True):
            along = direction if parameter is parameters[0] else others * direction
            parameter.grad = along + torch.randn_like(parameter) / 2
        getattr(type(optimizer), method)(made)
    numbers = {
        name: value.tolist() if isinstance(value, Tensor) else value
        for group in reversed(made.param_groups)
        for name, value in group.items()
        if name != "params"
    }
    return parameters[0].detach(), numbers


def _small_group(group: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A group of the same options, with small parameters of the same shapes."""
    like = next(iter(group["params"]), torch.empty(_MOST_PER_DIM, _MOST_PER_DIM))
    shape = [min(size, _MOST_PER_DIM) for size in like.shape]
    device = "cpu" if like.is_meta else like.device
    small = [nn.Parameter(torch.randn(shape, dtype=dtype, device=device)) for _ in range(1 + _OTHERS)]
    options = {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
    if isinstance(options.get("lr"), int | float):  # a schedule that begins with next to nothing hides much
        options["lr"] = max(float(options["lr"]), _LEAST_RATE)
    return {**options, "params": small}


def _small_copy(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Any:
    """An optimizer of the same class and settings, without anything that belongs to the model.

    What cannot be copied it lacks, and what has parameters of the model, so that nothing it does reaches the
    script's own.
    """
    made = object.__new__(type(optimizer))
    found: dict[str, Any] = {"param_groups": groups, "state": defaultdict(dict)}
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, value in vars(optimizer).items():
        if name in found:
            continue
        if name.startswith("_optimizer_"):
            found[name] = OrderedDict()  # hooks
        elif isinstance(value, Optimizer):  # as SAM has
            found[name] = _small_copy(value, groups)
        elif isinstance(value, FunctionType):
            if not hasattr(type(optimizer), name):  # a scheduler has put its own step() there
                found[name] = value
        elif not any(isinstance(item, nn.Parameter) and id(item) in own for item in _tensors_of(value)):
            with contextlib.suppress(Exception):  # whatever an object raises that is not to be copied
                found[name] = copy.deepcopy(value)
    vars(made).update(found)
    return made


def _tensors_of(value: Any) -> list[Any]:
    return list(value.parameters()) if isinstance(value, nn.Module) else leaves(value)


def _devices(optimizer: Optimizer) -> list[torch.device]:
    """Those with generators of their own."""
    devices = {parameter.device for group in optimizer.param_groups for parameter in group["params"]}
    return [device for device in devices if device.type == "cuda"]
