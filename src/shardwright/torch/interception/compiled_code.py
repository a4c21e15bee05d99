"""Decides where `torch.compile` code runs compiled, and where as plain Python.

::

    tracing                          as Python    fake tensors are no use to a compiler
    between units                    as Python    the compiler would compile our interception of each call
    inside units, outside of steps   compiled     that is what the user wants it for

This never imports the compiler: if no one else has imported it, there is no compiled code.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwright.torch._private import compiler_is_used, put_compiler_stance
from shardwright.torch.pytorch.source_line import called_from, stacklevel_of_user

__all__ = ["look_for_compiled_code", "nothing_compiled", "run_as_written", "uncompiled"]

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
