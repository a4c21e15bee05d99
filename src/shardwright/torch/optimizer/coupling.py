"""Tells whether an optimizer's update of a parameter depends on other parameters.

Each rank of a pipeline has some of the parameters. An optimizer that updates every parameter by itself is
unaffected. One that takes a norm or a step size over all parameters (Prodigy, D-Adaptation, LAMB with
clipping, SAM) would make a different update on each rank, none of them that of the whole model. Such an
optimizer is refused over stages; over replicas and shards it trains.

An optimizer that declares ``sums_over_stages = True`` sums over the ranks itself (`gradient_norm`), and is
right. Any other unknown optimizer is tried before its first update (`optimizer_trial`). If no copy of it can
make a step, a wrapped optimizer is refused, too, and a warning says so of an unwrapped one.

An optimizer may also distribute its parameters over all ranks and gather the updates (Muon). Inside the
`step` of a wrapped optimizer, it does so over the replicas of a stage (`replica_collectives`).

A script may call other methods of an unwrapped optimizer to step, such as `first_step` and `second_step` of
SAM. The library sees none of these calls. But one of them makes another optimizer step::

    sam.first_step()    climbs
    sam.second_step()   goes back, and calls sgd.step() ──► who calls? ──► sam is tried, with all its methods
"""

import inspect
import logging
from collections.abc import Sequence
from types import FrameType, FunctionType
from typing import NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from shardwright.errors import UsageError
from shardwright.run.context import context, is_initialized
from shardwright.torch.optimizer.optimizer_trial import Arguments, Trial, trial

__all__ = ["ELEMENTWISE", "coupled_around", "is_coupled", "refuse_coupling", "refuse_parts_of_the_world"]

log = logging.getLogger(__name__)

# Optimizers that treat every element of a parameter by itself, so that some rows are all that they need.
ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in "SGD Adam AdamW NAdam RAdam Adamax Adagrad Adadelta RMSprop Rprop ASGD".split()
)

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

_tried: "WeakKeyDictionary[Optimizer, dict[str, Trial]]" = WeakKeyDictionary()
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
) -> Trial:
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
