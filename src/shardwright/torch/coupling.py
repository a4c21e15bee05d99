"""Whether an optimizer's update of a parameter depends on other parameters.

The ranks of a pipeline have some parameters each. An optimizer that treats every parameter by itself does not
notice. One that takes a norm, or a step size, over all of them (Prodigy, D-Adaptation, LAMB that clips, SAM)
would make another update on each rank, and another one than for the whole model: it is run over the
parameters of all stages (`joint_update`), which takes longer.

One that says ``sums_over_stages = True`` adds up over the ranks by itself (`gradient_norm`), and is right.
Any other unknown optimizer is tried before its first update, on small parameters: two copies of it make some
steps, which differ in the gradients of all parameters but the first. Where the first one comes out otherwise,
or a number of the groups, parameters are coupled. Where no copy can make a step, a warning says so.

An optimizer may also deal its parameters out to all ranks, and gather what they have made of them (Muon): in
the `step` of a wrapped one that goes over the replicas of a stage (`replica_collectives`).

A script may step by methods of an optimizer that is not wrapped, as by `first_step` and `second_step` of SAM,
of which nobody hears. Another optimizer steps inside of one of them::

    sam.first_step()    climbs
    sam.second_step()   goes back, and calls sgd.step() ──► who calls? ──► sam is tried, with all its methods
"""

import contextlib
import copy
import functools
import inspect
import logging
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import FrameType, FunctionType
from typing import Any, NoReturn
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

__all__ = [
    "Trial",
    "coupled_around",
    "is_coupled",
    "refuse_coupling",
    "refuse_parts_of_the_world",
    "trial",
]

log = logging.getLogger(__name__)

_STEPS = 10
_LEAST_RATE = 1.0
_OTHERS = 2  # parameters in each group beside its first
_MOST_PER_DIM = 4
_MOST_LETTERS = 200  # of an error
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

_tried: "WeakKeyDictionary[Optimizer, dict[str, Trial]]" = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Trial:
    """What was found out of an optimizer.

    Attributes:
        couples: the update of a parameter, or a number of the groups, depends on several parameters.
        collects: it calls collectives of `torch.distributed`.
        problem: why it cannot be tried; empty where it can.
    """

    couples: bool = False
    collects: bool = False
    problem: str = ""


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
    if getattr(optimizer, "sums_over_stages", False) or _is_known(optimizer):
        return False
    return _trial_of(optimizer, method, groups).couples


def _trial_of(
    optimizer: Optimizer, method: str = "step", groups: Sequence[Sequence[Tensor]] | None = None
) -> Trial:
    """Tries it once."""
    tried = _tried.setdefault(optimizer, {})
    if method not in tried:
        found = tried[method] = trial(optimizer, method, groups)
        if found.problem and method == "step" and context().rank == 0:
            log.warning(
                "%s could not be tried on small parameters (%s), and is taken for an optimizer that treats "
                "each parameter by itself. If it needs all of them, for a norm or a step size, it is wrong "
                "over the stages of a pipeline: train by replicas alone then (pipeline_parallel_degree 1).",
                type(optimizer).__name__,
                found.problem,
            )
    return tried[method]


def coupled_around(optimizer: Optimizer, frame: FrameType | None) -> Optimizer | None:
    """Another optimizer in whose methods this one steps, if its updates need all parameters.

    Args:
        optimizer: steps, for the first time, and is not wrapped.
        frame: of what calls it.
    """
    while frame is not None:
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        caller = frame.f_locals.get(names[0]) if names else None
        if isinstance(caller, Optimizer) and caller is not optimizer and not _is_known(caller):
            methods = _own_methods(type(caller))
            return caller if any(is_coupled(caller, method) for method in methods) else None
        frame = frame.f_back
    return None


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
        f"{because} {remedy}"
    )


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
    if getattr(optimizer, "sums_over_stages", False) or _is_known(optimizer):
        return
    what = type(optimizer).__name__
    if any(isinstance(value, dist.ProcessGroup) for value in vars(optimizer).values()):
        raise UsageError(
            f"{what} has a process group of its own and shares its work among those ranks, and ranks of a "
            "pipeline, or of sharded data parallelism, have other parameters. Nothing was updated. Take the "
            "optimizer that is in it: what replicas share of its state says shard_optimizer_state."
        )
    if not wrapped and _trial_of(optimizer).collects:
        raise UsageError(
            f"{what} calls torch.distributed in its step, over all ranks, and these have other parameters. "
            "Nothing was updated. Call step() of sw.DistributedOptimizer(optimizer): there such calls go "
            "over the replicas of a stage."
        )


def _is_known(optimizer: Optimizer) -> bool:
    """Whether it is one of PyTorch's own that treats each parameter by itself."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind is not torch.optim.LBFGS


def _own_methods(kind: type[Optimizer]) -> list[str]:
    """What may change parameters: `step`, and other methods that need no arguments."""
    found = []
    for name in dir(kind):
        method = inspect.getattr_static(kind, name)
        if name.startswith("_") or not isinstance(method, FunctionType) or hasattr(Optimizer, name):
            continue
        _, *others = inspect.signature(method).parameters.values()
        if all(each.default is not each.empty or each.kind in _VARIADIC for each in others):
            found.append(name)
    return ["step", *found]


def trial(
    optimizer: Optimizer, method: str = "step", groups: Sequence[Sequence[Tensor]] | None = None
) -> Trial:
    """Tries whether an optimizer couples parameters.

    It is called without a closure, and with one where that fails.

    >>> trial(torch.optim.AdamW([nn.Parameter(torch.ones(2))]))
    Trial(couples=False, collects=False, problem='')
    """
    given = [group["params"] for group in optimizer.param_groups] if groups is None else groups
    firsts = [next(iter(group), torch.empty(_MOST_PER_DIM, _MOST_PER_DIM)) for group in given]
    problem = ""
    for closes, dtype in product((False, True), (torch.float64, torch.float32)):  # float64 shows a small rate
        with (
            plain_torch(),
            over_replicas(sends=False),
            python_random_kept(),
            warnings.catch_warnings(),
            torch.random.fork_rng(devices=_devices(optimizer)),
        ):
            warnings.simplefilter("ignore")
            calls_before = num_collectives()
            run = functools.partial(_steps_of_copy, optimizer, method, firsts, dtype, closes=closes)
            try:
                (first, numbers), (again, other_numbers) = run(others=1.0), run(others=-0.2)
            except Exception as error:  # whatever one raises on parameters that it was not made for
                problem = problem or f"{type(error).__name__}: {error}"[:_MOST_LETTERS]
                continue
        alike = torch.allclose(first, again, rtol=0.0, atol=0.0, equal_nan=True)
        couples = not alike or str(numbers) != str(other_numbers)
        return Trial(couples, collects=num_collectives() > calls_before)
    inside = [trial(value) for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    return next((found for found in inside if found.couples), Trial(problem=problem))


def _steps_of_copy(
    optimizer: Optimizer,
    method: str,
    firsts: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    others: float,
    closes: bool,
) -> tuple[Tensor, dict[str, Any]]:
    """What becomes of the first parameter, and of the numbers of the groups.

    Args:
        optimizer: of which a copy is made.
        method: called in each step.
        firsts: the first parameter of each group.
        dtype: of the parameters.
        others: how far the gradients of the other parameters keep to a direction, in every step.
        closes: give it a closure that computes gradients.
    """
    torch.manual_seed(0)
    groups = [
        _small_group(group, like, dtype) for group, like in zip(optimizer.param_groups, firsts, strict=True)
    ]
    real = [group["params"] for group in optimizer.param_groups]
    made = _small_copy(optimizer, groups, {id(p): place for place, own in enumerate(real) for p in own})
    parameters = [parameter for group in groups for parameter in group["params"]]
    directions = [torch.randn_like(parameter) for parameter in parameters]

    def closure() -> Tensor:
        for parameter, direction in zip(parameters, directions, strict=True):
            along = direction if parameter is parameters[0] else others * direction
            parameter.grad = along + torch.randn_like(parameter) / 2
        return torch.ones((), dtype=dtype)

    for _ in range(_STEPS):
        closure()
        getattr(type(optimizer), method)(made, *([closure] if closes else []))
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


def _small_copy(optimizer: Optimizer, groups: list[dict[str, Any]], places: Mapping[int, int]) -> Any:
    """An optimizer of the same class and settings, without anything that belongs to the model.

    What cannot be copied it lacks, and what has parameters of the model, but for lists of them, so that
    nothing it does reaches the script's own.

    Args:
        optimizer: the script's own.
        groups: with small parameters.
        places: of a real parameter, by its id: the number of its group.
    """
    made = object.__new__(type(optimizer))
    found: dict[str, Any] = {"param_groups": groups, "state": defaultdict(dict)}
    for name, value in vars(optimizer).items():
        if name in found:
            continue
        if name.startswith("_optimizer_"):
            found[name] = OrderedDict()  # hooks
        elif isinstance(value, Optimizer):  # as SAM has
            found[name] = _small_copy(value, groups, places)
        elif isinstance(value, list) and value and all(isinstance(item, nn.Parameter) for item in value):
            used = {places[id(item)] for item in value if id(item) in places} or range(len(groups))
            found[name] = [small for place in sorted(used) for small in groups[place]["params"]]
        elif isinstance(value, FunctionType):
            if not hasattr(type(optimizer), name):  # a scheduler has put its own step() there
                found[name] = value
        elif not any(isinstance(item, nn.Parameter) and id(item) in places for item in _tensors_of(value)):
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
