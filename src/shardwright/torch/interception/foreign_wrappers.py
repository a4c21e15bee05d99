"""Recognises PyTorch's wrappers: DDP and its kin around a model, compilers around a `DistributedModel`."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shardwright.errors import UsageError

__all__ = ["refuse_wrapped_model", "refuse_wrappers"]

_REPLICAS = (
    "Replicas are Shardwright's task here: pass the model as it is, and set data_parallel_degree "
    "(or start more ranks than pipeline_parallel_degree)."
)
_COMPILED = (
    "Compile the model before it is wrapped, DistributedModel(torch.compile(model)), or by model.compile(): "
    "each rank then compiles its units."
)
_SCRIPTED = (
    "compiled as a whole by torch.jit.script or torch.jit.trace, so that it has no parts to be placed. Pass "
    "the Python module that it was made of; modules inside it may be scripted."
)


def refuse_wrappers(module: nn.Module, *, alone: bool) -> None:
    """Refuses a model that is wrapped already, or has such a module inside."""
    for name, inner in module.named_modules():
        problem = _replicated(inner)
        if inner is module and not alone and isinstance(module, torch.jit.ScriptModule):
            problem = _SCRIPTED
        if problem is not None:
            where = f"its module {name}" if name else "it"
            raise UsageError(f"the model cannot be pipelined: {where} is {problem}")


def refuse_wrapped_model(arguments: Iterable[Any], model: nn.Module) -> None:
    """Refuses a wrapper around the distributed model among the arguments of a step function."""
    for argument in arguments:
        if argument is model or not isinstance(argument, nn.Module):
            continue
        problem = _problem(argument)
        if problem is not None and any(inner is model for inner in argument.modules()):
            raise UsageError(f"the step function gets a DistributedModel inside another wrapper: {problem}")


def _replicated(module: nn.Module) -> str | None:
    if isinstance(module, DataParallel | DistributedDataParallel):
        return f"a torch.nn.parallel.{type(module).__name__}. {_REPLICAS}"
    return None


def _problem(module: nn.Module) -> str | None:
    compiled = isinstance(vars(module).get("_modules", {}).get("_orig_mod"), nn.Module)
    if compiled or vars(module).get("_compiled_call_impl") is not None:
        return f"compiled by torch.compile. {_COMPILED}"
    return _replicated(module)
