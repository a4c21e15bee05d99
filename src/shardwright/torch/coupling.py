"""Whether an optimizer's update of a parameter depends on other parameters.

The ranks of a pipeline have some parameters each. An optimizer that treats every parameter by itself does not
notice. One that takes a norm, or a step size, over all of them (Prodigy, D-Adaptation, LAMB that clips, SAM)
would make another update on each rank, and another one than for the whole model: it is run over the
parameters of all stages (`joint_update`), which takes longer.

One that says ``sums_over_stages = True`` adds up over the ranks by itself (`gradient_norm`), and is right.
Any other unknown optimizer is tried before its first update, on small parameters: two copies of it make some
steps, which differ in the gradients of all parameters but the first. Where the first one comes out otherwise,
or a number of the groups, parameters are coupled.
"""

import copy
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from types import FunctionType
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.errors import UsageError
from shardwright.torch.context import context, is_initialized
from shardwright.torch.glue import plain_torch

__all__ = ["is_coupled", "refuse_coupling", "trial"]

_STEPS = 10
_LEAST_RATE = 1.0
_OTHERS = 2  # parameters in each group beside its first
_MOST_PER_DIM = 4

_tried: "WeakKeyDictionary[Optimizer, dict[str, bool]]" = WeakKeyDictionary()


def is_coupled(
    optimizer: Optimizer, method: str = "step", *, groups: Sequence[Sequence[Tensor]] | None = None
) -> bool:
    """Whether an optimizer's updates need all parameters, where this rank has some; tried once.

    Args:
        optimizer: the script's own.
        method: by which it changes parameters.
        groups: the parameters of its groups on all ranks, so that all find the same; None for those it has.
    """
    if not is_initialized() or context().mesh.pipeline == 1:
        return False
    if getattr(optimizer, "sums_over_stages", False):
        return False
    tried = _tried.setdefault(optimizer, {})
    if method not in tried:
        tried[method] = trial(optimizer, method, groups)
    return tried[method]


def refuse_coupling(optimizer: Optimizer, because: str, remedy: str) -> NoReturn:
    """Refuses an optimizer that `is_coupled` over stages.

    Args:
        optimizer: the script's own.
        because: why this cannot be done here, as a sentence.
        remedy: another.

    Raises:
        UsageError: always, on all ranks alike.
    """
    raise UsageError(
        f"{type(optimizer).__name__} updates each parameter by what it knows of all, and each rank of a "
        f"pipeline has those of its own stages: it would make other updates than for the whole model. "
        f"{because} Nothing was updated. {remedy}"
    )


def trial(
    optimizer: Optimizer, method: str = "step", groups: Sequence[Sequence[Tensor]] | None = None
) -> bool:
    """Tries whether an optimizer couples parameters.

    It is taken not to where it cannot be tried, as it needs a closure or sparse gradients.

    >>> trial(torch.optim.AdamW([nn.Parameter(torch.ones(2))]))
    False
    """
    given = [group["params"] for group in optimizer.param_groups] if groups is None else groups
    firsts = [next(iter(group), torch.empty(_MOST_PER_DIM, _MOST_PER_DIM)) for group in given]
    for dtype in (torch.float64, torch.float32):  # a small learning rate shows in the first
        with plain_torch(), warnings.catch_warnings(), torch.random.fork_rng(devices=_devices(optimizer)):
            warnings.simplefilter("ignore")
            try:
                first, numbers = _steps_of_copy(optimizer, method, firsts, dtype, others=1.0)
                again, other_numbers = _steps_of_copy(optimizer, method, firsts, dtype, others=-0.2)
            except Exception:  # whatever somebody's optimizer raises on parameters that it was not made for
                continue
        alike = torch.allclose(first, again, rtol=0.0, atol=0.0, equal_nan=True)
        return not alike or str(numbers) != str(other_numbers)
    return False


def _steps_of_copy(
    optimizer: Optimizer, method: str, firsts: Sequence[Tensor], dtype: torch.dtype, *, others: float
) -> tuple[Tensor, dict[str, Any]]:
    """What becomes of the first parameter, and of the numbers of the groups.

    Args:
        optimizer: of which a copy is made.
        method: called in each step.
        firsts: the first parameter of each group.
        dtype: of the parameters.
        others: how far the gradients of the other parameters keep to a direction, in every step.
    """
    torch.manual_seed(0)
    groups = [
        _small_group(group, like, dtype) for group, like in zip(optimizer.param_groups, firsts, strict=True)
    ]
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


def _small_group(group: dict[str, Any], like: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """A group of the same options, with small parameters of the shape of one."""
    shape = [min(size, _MOST_PER_DIM) for size in like.shape]
    device = "cpu" if like.is_meta else like.device
    small = [nn.Parameter(torch.randn(shape, dtype=dtype, device=device)) for _ in range(1 + _OTHERS)]
    options = {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
    if isinstance(options.get("lr"), int | float):  # a schedule that begins with next to nothing hides much
        options["lr"] = max(float(options["lr"]), _LEAST_RATE)
    return {**options, "params": small}


def _small_copy(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Any:
    """An optimizer of the same class and settings, without anything that belongs to the model.

    What is no plain setting it lacks, so that nothing it does reaches the script's own.
    """
    made = object.__new__(type(optimizer))
    found: dict[str, Any] = {"param_groups": groups, "state": defaultdict(dict)}
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
        elif isinstance(value, bool | int | float | str | tuple | dict | torch.device | None):
            found[name] = copy.deepcopy(value)
    vars(made).update(found)
    return made


def _devices(optimizer: Optimizer) -> list[torch.device]:
    """Those with generators of their own."""
    devices = {parameter.device for group in optimizer.param_groups for parameter in group["params"]}
    return [device for device in devices if device.type == "cuda"]
