"""Decides where `torch.compile` code runs compiled, and recognises PyTorch's wrappers.

::

    tracing                          as Python    fake tensors are no use to a compiler
    between units                    as Python    the compiler would compile our interception of each call
    inside units, outside of steps   compiled     that is what the user wants it for

This never imports the compiler: if no one else has imported it, there is no compiled code.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shardwright.errors import UsageError
from shardwright.torch._private.modules import compiler_is_used, put_compiler_stance
from shardwright.torch.pytorch.modules import called_from, stacklevel_of_user

_WHOLE_STEP = (
    "a step function runs on several ranks, stage by stage, and cannot be compiled as a whole. To have the "
    "units of each rank compiled, compile the model: sw.DistributedModel(torch.compile(model))."
)


class _Compiler:
    """The way in which the process runs compiled code just now.

    Attributes:
        is_used: something is compiled, or will be.
        is_off: the compiler has been told to stand back.
        before: what it had been told by the script.
    """

    between = False
    traces = False
    is_used = False
    is_off = False
    before: object = None


def run_as_written(between: bool) -> None:
    """Says whether code runs whose calls are intercepted."""
    _Compiler.between = between
    if not (_Compiler.is_used or _Compiler.traces or _Compiler.is_off):
        return
    wanted = between or _Compiler.traces
    if wanted is not _Compiler.is_off and "torch._dynamo" in sys.modules:
        if wanted:
            _Compiler.before = put_compiler_stance(None)
        else:
            put_compiler_stance(_Compiler.before)
        _Compiler.is_off = wanted


def look_for_compiled_code() -> None:
    """Takes note of whether anything is compiled by now; each batch does so, and each trace."""
    _Compiler.is_used = _Compiler.is_used or compiler_is_used()


def code_is_compiled() -> bool:
    return _Compiler.is_used


def forget_compiled_code() -> None:
    """Drops what was compiled, all of it by the library: calls need not keep the compiler off any more."""
    torch.compiler.reset()
    _Compiler.is_used = False


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Runs all code as Python wrote it, also inside units; and TorchScript without its optimizer.

    What that has made of a batch norm in a second run fails where operations are counted.
    """
    before, _Compiler.traces = _Compiler.traces, True
    run_as_written(_Compiler.between)
    try:
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            yield
    finally:
        look_for_compiled_code()
        _Compiler.traces = before
        run_as_written(_Compiler.between)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A step function that a compiler leaves alone, around it or around the loop that calls it."""

    def pointed_out(*args: Any, **kwargs: Any) -> Any:
        if called_from("torch._dynamo.eval_frame", "compile_wrapper"):
            warnings.warn(f"torch.compile has no effect here: {_WHOLE_STEP}", stacklevel=stacklevel_of_user())
        return function(*args, **kwargs)

    left_alone: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not left_alone:
            disable: Any = torch.compiler.disable
            left_alone.append(disable(pointed_out, reason=_WHOLE_STEP))
        return left_alone[0](*args, **kwargs)

    return call


_REPLICAS = (
    "Replicas are Shardwright's task here: pass the model as it is, and set data_parallel_degree "
    "(or start more ranks than pipeline_parallel_degree)."
)
_COMPILED = (
    "Compile the model before it is wrapped, DistributedModel(torch.compile(model)), or by model.compile(): "
    "each rank then compiles its units."
)
_SCRIPTED = (
    "compiled by torch.jit.script or torch.jit.trace, so that its tensors cannot be given up to other ranks. "
    "Take the Python module that it was made of; functions that it calls may be scripted."
)


def refuse_wrappers(module: nn.Module, *, alone: bool) -> None:
    """Refuses a model that is wrapped already, or has such a module inside."""
    for name, inner in module.named_modules():
        problem = _replicated(inner)
        if not alone and isinstance(inner, torch.jit.ScriptModule):
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
