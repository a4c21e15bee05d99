"""Tells whether an optimizer couples parameters, by a trial on small ones.

Two copies of the optimizer make some steps, with different gradients for all parameters but the first of each
group. If a first parameter, or a number of the groups, comes out different, parameters are coupled. So they
are if the optimizer draws random numbers (noise, stochastic rounding): what a parameter gets depends on how
many were drawn before, for others.

Each rank of a pipeline has some of the parameters. An optimizer that updates every parameter by itself is
unaffected. One that takes a norm or a step size over all parameters (Prodigy, D-Adaptation, LAMB with
clipping, SAM) would make a different update on each rank, none of them that of the whole model. Such an
optimizer is refused over stages; over replicas and shards it trains.

An optimizer that declares ``sums_over_stages = True`` sums over the ranks itself (`gradient_norm`), and is
right. Any other unknown optimizer is tried before its first update (`optimizer_trial`). If no copy of it can
make a step, a wrapped optimizer is refused, too, and a warning says so of an unwrapped one.

An optimizer may also distribute its parameters over all ranks and gather the updates (Muon). Inside the
`step` of a wrapped optimizer, it does so over the replicas of a stage (`script_collectives`).

A script may call other methods of an unwrapped optimizer to step, such as `first_step` and `second_step` of
SAM. The library sees none of these calls. But one of them makes another optimizer step::

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from types import FrameType, FunctionType
from typing import Any, NoReturn, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.errors import UsageError
from shardwright.run.context import context, is_initialized
from shardwright.torch.interception.glue import plain_torch
from shardwright.torch.pytorch.tree import leaves, map_tree
from shardwright.torch.randomness import get_state, python_random_kept, same_state
from shardwright.torch.script_collectives import num_collectives, over_replicas

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
class _Trial:
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
) -> _Trial:
    """Tries whether an optimizer couples parameters.

    It is called with the arguments, where these are plain numbers, and with a closure where that fails.

    >>> trial(torch.optim.AdamW([nn.Parameter(torch.ones(2))]))
    _Trial(couples=False, collects=False, problem='')
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
        return _Trial(draws or str(found) != str(again), collects=num_collectives() > calls_before)
    inside = [trial(inner) for inner in inner_optimizers(optimizer)]
    return next((found for found in inside if found.couples), _Trial(problem=problem))


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


log = logging.getLogger(__name__)

# Optimizers that treat every element of a parameter by itself, so that some rows are all that they need.
ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in "SGD Adam AdamW NAdam RAdam Adamax Adagrad Adadelta RMSprop Rprop ASGD".split()
)

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

_tried: "WeakKeyDictionary[Optimizer, dict[str, _Trial]]" = WeakKeyDictionary()
_untried: "WeakSet[Optimizer]" = WeakSet()  # of which a warning has said that they could not be tried


def is_coupled(
    optimizer: Optimizer,
    method: str = "step",
    *,
    groups: Sequence[Sequence[Tensor]] | None = None,
    arguments: Arguments = ((), {}),
    if_unknown: bool = False,
) -> bool:
    """Whether an optimizer's updates need all parameters, where this rank has some; tried once."""
    if not is_initialized() or context().mesh.pipeline == 1:
        return False
    if getattr(optimizer, "sums_over_stages", False) or _is_known(optimizer):
        return False
    found = _trial_of(optimizer, method, groups, arguments)
    if not found.problem:
        return found.couples
    if method != "step":
        return any(other.couples for other in _tried[optimizer].values())
    if optimizer not in _untried:
        _untried.add(optimizer)
        if context().rank == 0 and not if_unknown:
            log.warning(
                "%s could not be tried on small parameters (%s), and is taken for an optimizer that treats "
                "each parameter by itself. If it needs all of them, for a norm or a step size, it is wrong "
                "over the stages of a pipeline: train by replicas alone then (pipeline_parallel_degree 1).",
                type(optimizer).__name__,
                found.problem,
            )
    return if_unknown


def _trial_of(
    optimizer: Optimizer,
    method: str = "step",
    groups: Sequence[Sequence[Tensor]] | None = None,
    arguments: Arguments = ((), {}),
) -> _Trial:
    """Tries it once."""
    tried = _tried.setdefault(optimizer, {})
    if method not in tried:
        tried[method] = trial(optimizer, method, groups, arguments)
    return tried[method]


def coupled_around(optimizer: Optimizer, frame: FrameType | None) -> Optimizer | None:
    """Another optimizer in whose methods this one steps, if its updates need all parameters."""
    while frame is not None:
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        caller = frame.f_locals.get(names[0]) if names else None
        if isinstance(caller, Optimizer) and caller is not optimizer and not _is_known(caller):
            methods = _own_methods(type(caller))
            return caller if any(is_coupled(caller, method) for method in methods) else None
        frame = frame.f_back
    return None


def refuse_coupling(optimizer: Optimizer, remedy: str = "") -> NoReturn:
    """Refuses an optimizer that `is_coupled` over stages; on all ranks alike."""
    name = type(optimizer).__name__
    tried = _tried.get(optimizer, {}).get("step")
    what = f"{name} updates each parameter by what it knows of all (or draws random numbers for each in turn)"
    if tried is not None and tried.problem:
        what = f"{name} could not be tried on small parameters ({tried.problem}), and may need all of them"
    raise UsageError(
        f"{what}, and each rank of a pipeline has those of its own stages: it would make other updates than "
        "for the whole model. "
        + (
            remedy
            or "Train by replicas, by sharded_data_parallel_degree or by tensor_parallel_degree, without "
            "stages (pipeline_parallel_degree 1), or with an optimizer that treats each parameter by itself; "
            f"if this one does, or sums over the ranks, say so: set sums_over_stages = True on {name}."
        )
    )


def refuse_parts_of_the_world(optimizer: Optimizer, *, wrapped: bool) -> None:
    """Refuses an optimizer that deals its work out to all ranks, where these have other parameters."""
    mesh = context().mesh if is_initialized() else None
    if mesh is None or max(mesh.pipeline, mesh.shard, mesh.share) == 1:
        return
    if getattr(optimizer, "sums_over_stages", False) or _is_known(optimizer):
        return
    what = type(optimizer).__name__
    if any(isinstance(value, dist.ProcessGroup) for value in vars(optimizer).values()):
        raise UsageError(
            f"{what} has a process group of its own and shares its work among those ranks, and ranks of a "
            "pipeline, or of sharded data or tensor parallelism, have other parameters. Nothing was updated. "
            "Take the optimizer that is in it: what replicas share of its state says shard_optimizer_state."
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
    """The methods that may change parameters: `step`, and others that need no arguments."""
    found = []
    for name in dir(kind):
        method = inspect.getattr_static(kind, name)
        if name.startswith("_") or not isinstance(method, FunctionType) or hasattr(Optimizer, name):
            continue
        _, *others = inspect.signature(method).parameters.values()
        if all(each.default is not each.empty or each.kind in _VARIADIC for each in others):
            found.append(name)
    return ["step", *found]
