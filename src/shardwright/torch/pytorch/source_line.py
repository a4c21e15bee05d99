"""Finds the current line of the script, tells its code from others', names work for the profiler."""

import functools
import inspect
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import CodeType, FrameType
from typing import Any

from torch.profiler import record_function

import shardwright
from shardwright.torch._private import is_profiled

_NOT_THE_USERS = ("torch.", "shardwright.", "smdistributed.", "contextlib")


def user_line(inside: FrameType | None = None) -> str:
    """``file:line`` of the innermost frame that is neither torch's nor ours."""
    frame = sys._getframe(1) if inside is None else inside
    fallback = ""
    while frame is not None:
        fallback = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if is_the_users(frame):
            return fallback
        frame = frame.f_back  # type: ignore[assignment]
    return fallback


def line_of(function: Callable[..., Any]) -> str:
    """``file:line`` of a function's definition; empty if it is not written in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def stacklevel_of_user() -> int:
    """The ``stacklevel`` with which a warning of the caller names the line of `user_line`."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and not is_the_users(frame):
        frame, level = frame.f_back, level + 1
    return level


def is_the_users(frame: FrameType) -> bool:
    """Whether a frame is the user's: neither torch's, nor ours, nor of code in between."""
    module = frame.f_globals.get("__name__", "")
    return not module.startswith(_NOT_THE_USERS) and module not in ("copy", "torch")


def called_from(module: str, function: str = "") -> bool:
    """Whether a function of this module, of this name if one is given, is among the callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == module and function in ("", frame.f_code.co_name):
            return True
        frame = frame.f_back
    return False


def is_running(functions: Iterable[Callable[..., Any]]) -> bool:
    """Whether one of these functions, methods, or objects that can be called is among the callers."""
    codes = {_code_of(function) for function in functions} - {None}
    frame: FrameType | None = sys._getframe(1) if codes else None
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back
    return False


def _code_of(function: Any) -> CodeType | None:
    """The code that runs in a call; None where Python does not run it."""
    if isinstance(function, functools.partial):
        return _code_of(function.func)
    function = getattr(function, "__func__", function)
    if not hasattr(function, "__code__"):
        function = type(function).__call__
    return getattr(function, "__code__", None)


def outermost_checkpoint() -> FrameType | None:
    """The call of `torch.utils.checkpoint.checkpoint` that we are in; of nested ones, the outermost."""
    frame: FrameType | None = sys._getframe(1)
    found = None
    while frame is not None:
        if (
            frame.f_code.co_name == "checkpoint"
            and frame.f_globals.get("__name__") == "torch.utils.checkpoint"
        ):
            found = frame
        frame = frame.f_back
    return found


def frames_up_to(module: str) -> list[str] | None:
    """Modules of the callers below the innermost function of this module; None if it is not among them."""
    frame = sys._getframe(1)
    names: list[str] = []
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == module:
            return names
        names.append(name)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def custom_function_call() -> int | None:
    """Identity of the innermost running ``apply`` of an ``autograd.Function`` that is not torch's own."""
    frame = sys._getframe(1)
    callee = ""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == "torch.autograd.function" and frame.f_code.co_name == "apply":
            # Recomputation is understood: see `torch/backward/activation_checkpointing.py`.
            return None if callee == "torch.utils.checkpoint" else id(frame)
        callee = name
        frame = frame.f_back  # type: ignore[assignment]
    return None


_FOLDERS = {
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *site.getsitepackages(),
    site.getusersitepackages(),
    os.path.dirname(shardwright.__file__),
}
_NOT_THE_SCRIPTS = (*(f"{folder}{os.sep}" for folder in _FOLDERS), "<frozen ")
_OURS = ("shardwright.", "smdistributed.")


def is_script_file(path: str) -> bool:
    """Whether a file of code is the script's own, or one that it brings along."""
    return not path.startswith(_NOT_THE_SCRIPTS)


def is_script_class(kind: type) -> bool:
    """Whether a class is of such a file, or of none: of a notebook, or of a module in C."""
    if f"{kind.__module__}.".startswith(_OURS) or kind.__module__ == "builtins":
        return False
    path = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return path is None or is_script_file(path)


def range_named(name: object) -> AbstractContextManager[object]:
    """A range ``shardwright NAME`` in the profile, if one is being recorded."""
    return record_function(f"shardwright {name}") if is_profiled() else nullcontext()
