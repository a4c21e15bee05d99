"""Tries an optimizer on small parameters, to find out whether it couples them.

Two copies of the optimizer make some steps, with different gradients for all parameters but the first of each
group. If a first parameter, or a number of the groups, comes out different, parameters are coupled. So they
are if the optimizer draws random numbers (noise, stochastic rounding): what a parameter gets depends on how
many were drawn before, for others.
"""

import contextlib
import copy
import functools
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.run.context import context, is_initialized
from shardwright.torch.interception.glue import plain_torch
from shardwright.torch.pytorch.tree import leaves, map_tree
from shardwright.torch.randomness.python_random import python_random_kept
from shardwright.torch.randomness.rng import get_state, same_state
from shardwright.torch.script_collectives.replica_collectives import num_collectives, over_replicas

__all__ = ["Arguments", "Trial", "inner_optimizers", "is_trying", "trial"]

# Of a method: by position, and by name.
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

_STEPS = 10
_LARGE_STEPS, _LARGE = 3, 1e3  # the last ones have larger gradients: some clip only those
_LEAST_RATE = 1.0
_OTHERS = 2  # parameters in each group beside its first
_MOST_PER_DIM = 4
_MOST_LETTERS = 200  # of an error


class _Trying:
    now = False


def is_trying() -> bool:
    """Whether an optimizer is tried: what it calls of the script would be called once more."""
    return _Trying.now


@contextlib.contextmanager
def _trying() -> Iterator[None]:
    _Trying.now = True
    try:
        yield
    finally:
        _Trying.now = False


@dataclass(frozen=True, slots=True)
class Trial:
    """The findings about an optimizer.

    Attributes:
        couples: the update of a parameter, or a number of the groups, depends on several parameters, or on
            how many random numbers were drawn for others.
        collects: it calls collectives of `torch.distributed`.
        problem: why it cannot be tried; empty where it can.
    """

    couples: bool = False
    collects: bool = False
    problem: str = ""


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Those that it has in its attributes, and calls: SAM has one, others a list."""
    return [
        item for value in vars(optimizer).values() for item in leaves(value) if isinstance(item, Optimizer)
    ]


def trial(
    optimizer: Optimizer,
    method: str = "step",
    groups: Sequence[Sequence[Tensor]] | None = None,
    arguments: Arguments = ((), {}),
) -> Trial:
    """Tries whether an optimizer couples parameters.

    It is called with the arguments, where these are plain numbers, and with a closure where that fails.

    >>> trial(torch.optim.AdamW([nn.Parameter(torch.ones(2))]))
    Trial(couples=False, collects=False, problem='')
    """
    if groups is None:
        groups = [group["params"] for group in optimizer.param_groups]
    firsts = [next(iter(group), torch.empty(_MOST_PER_DIM, _MOST_PER_DIM)) for group in groups]
    if not all(isinstance(item, bool | int | float | str | None) for item in leaves(arguments)):
        arguments = ((), {})
    problem = ""
    for closes, dtype in product((False, True), (torch.float64, torch.float32)):  # float64 shows a small rate
        with (
            _trying(),
            plain_torch(),
            over_replicas(sends=False),
            python_random_kept(),
            warnings.catch_warnings(),
            torch.random.fork_rng(devices=_devices(optimizer)),
        ):
            warnings.simplefilter("ignore")
            calls_before = num_collectives()
            given = None if closes else arguments
            run = functools.partial(_steps_of_copy, optimizer, method, firsts, dtype, given)
            try:
                (found, draws), (again, _) = run(others=4.0), run(others=-0.2)
            except Exception as error:  # whatever one raises on parameters that it was not made for
                problem = problem or f"{type(error).__name__}: {error}"[:_MOST_LETTERS]
                continue
        return Trial(draws or str(found) != str(again), collects=num_collectives() > calls_before)
    inside = [trial(inner) for inner in inner_optimizers(optimizer)]
    return next((found for found in inside if found.couples), Trial(problem=problem))


def _steps_of_copy(
    optimizer: Optimizer,
    method: str,
    firsts: Sequence[Tensor],
    dtype: torch.dtype,
    arguments: Arguments | None,
    *,
    others: float,
) -> tuple[list[dict[str, Any]], bool]:
    """The first parameter and the numbers of each group, after steps of a copy; and whether that draws."""
    torch.manual_seed(0)
    groups = [
        _small_group(group, like, dtype) for group, like in zip(optimizer.param_groups, firsts, strict=True)
    ]
    made = _small_copy(optimizer, groups)
    own = {id(group["params"][0]) for group in groups}
    parameters = [parameter for group in groups for parameter in group["params"]]
    directions = [torch.randn_like(parameter) for parameter in parameters]
    size, draws = 1.0, False
    device = next(iter(parameters), torch.empty(0)).device
    own_generator = torch.Generator(device).manual_seed(0)  # the optimizer has the other one for itself

    def closure() -> Tensor:
        for parameter, direction in zip(parameters, directions, strict=True):
            along = direction if id(parameter) in own else others * direction
            noise = torch.empty_like(parameter).normal_(generator=own_generator)
            parameter.grad = size * (along + noise / 2)
        return torch.ones((), dtype=dtype)

    args, options = ((closure,), {}) if arguments is None else arguments
    generators = [item for item in leaves(vars(made)) if isinstance(item, torch.Generator)]
    for number in range(_STEPS):
        size = _LARGE if number >= _STEPS - _LARGE_STEPS else 1.0
        closure()
        before = get_state(device, generators)
        getattr(type(optimizer), method)(made, *args, **options)
        draws |= not same_state(before, get_state(device, generators))
    found = [
        {name: value.tolist() if isinstance(value, Tensor) else value for name, value in group.items()}
        | {"params": small["params"][0].tolist()}
        for group, small in zip(made.param_groups, groups, strict=True)
    ]
    return found, draws


def _small_group(group: dict[str, Any], like: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """A group of the same options, with small parameters of the shape of one."""
    shape = [min(size, _MOST_PER_DIM) for size in like.shape]
    device = context().device if is_initialized() else like.device  # the same on all ranks
    small = [nn.Parameter(torch.randn(shape, dtype=dtype, device=device)) for _ in range(1 + _OTHERS)]
    options = {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
    if isinstance(options.get("lr"), int | float):  # a schedule that begins with next to nothing hides much
        options["lr"] = max(float(options["lr"]), _LEAST_RATE)
    return {**options, "params": small}


def _small_copy(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Any:
    """An optimizer of the same class and settings, without anything that belongs to the model.

    What cannot be copied it lacks, and what has parameters of the model, but for lists of them, so that
    nothing it does reaches the script's own.
    """
    places = {id(p): place for place, group in enumerate(optimizer.param_groups) for p in group["params"]}
    made = object.__new__(type(optimizer))
    found: dict[str, Any] = {"param_groups": groups, "state": defaultdict(dict)}

    def copied(item: Any) -> Any:
        if isinstance(item, Optimizer):
            return _small_copy(item, _groups_of_inner(item, optimizer, groups))
        return copy.deepcopy(item)

    for name, value in vars(optimizer).items():
        if name in found:
            continue
        if name.startswith("_optimizer_"):
            found[name] = OrderedDict()  # hooks
        elif isinstance(value, list) and value and all(isinstance(item, nn.Parameter) for item in value):
            used = {places[id(item)] for item in value if id(item) in places} or range(len(groups))
            found[name] = [small for place in sorted(used) for small in groups[place]["params"]]
        elif isinstance(value, FunctionType):
            if not hasattr(type(optimizer), name):  # a scheduler has put its own step() there
                found[name] = value
        elif not any(isinstance(item, nn.Parameter) and id(item) in places for item in _tensors_of(value)):
            with contextlib.suppress(Exception):  # whatever an object raises that is not to be copied
                found[name] = map_tree(copied, value)
    vars(made).update(found)
    return made


def _groups_of_inner(
    inner: Optimizer, outer: Optimizer, groups: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Groups with small parameters for an optimizer inside of another one, which may share them."""
    found = []
    for group in inner.param_groups:
        own = {id(parameter) for parameter in group["params"]}
        shared, overlapping = [], []
        for real, small in zip(outer.param_groups, groups, strict=True):
            if real is group:
                shared.append(small)
            elif any(id(parameter) in own for parameter in real["params"]):
                overlapping.append(small)
        if shared:
            found += shared
            continue
        options = {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
        parameters = [small for each in overlapping or groups for small in each["params"]]
        found.append({**options, "params": parameters})
    return found


def _tensors_of(value: Any) -> list[Any]:
    return list(value.parameters()) if isinstance(value, nn.Module) else leaves(value)


def _devices(optimizer: Optimizer) -> list[torch.device]:
    """Those with generators of their own."""
    devices = {parameter.device for group in optimizer.param_groups for parameter in group["params"]}
    return [device for device in devices if device.type == "cuda"]
