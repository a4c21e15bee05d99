"""Tells a step function's own code, which may read tensor values, from the model's code.

Model code runs where its tensors are: a module that reads values is placed whole. A step function runs on
every rank of a replica, so all of them must know what it reads. That takes messages in the middle of a
microbatch, and a trace cannot foresee the reads. So the trace of a step function ends at its first read
(``loss.item()``, ``if torch.isnan(loss)``) on any rank (`TraceEnds`). The code after it is no part of the
program: every rank runs it as it is, with the tensors that it needs (`known_values`). A step function without
a read is traced to its end, and what it returns is known when the step is over.
"""

import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from shardwright.torch.pytorch.functions import READS_DATA

__all__ = [
    "ReadingStep",
    "TraceEnds",
    "asks_for_types",
    "assumed_loss",
    "code_of_model",
    "in_step_code",
    "reads_values",
    "writes_text",
]

# Greenlets have contexts of their own, so that microbatches do not see each other's.
_in_step_code: ContextVar[bool] = ContextVar("_in_step_code", default=False)

_WRITES_TEXT = frozenset({Tensor.__repr__, Tensor.__format__})
# What a function calls, by name, that reads tensors. (Conditions are seen in the trace. Texts are not looked
# for: most f-strings are those of error messages, about shapes.)
_READING_METHODS = frozenset(
    "item tolist numpy format isnan isfinite isinf allclose equal nonzero print".split()
)
# `loss.float()` is another matter than `float(loss)`.
_READING_BUILTINS = frozenset("float int bool print format isnan isfinite isinf allclose equal".split())
_LOADS_OF_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_DEPTH = 3


class TraceEnds(BaseException):
    """Leaves a step function that is traced, where its program ends."""


class ReadingStep:
    """A step function whose own code may read tensor values, wherever the tensors are.

    Attributes:
        may_read: whether its code has a call that reads, maybe one that not every step and rank makes.
        weighs_labels: its loss is a mean over labels; None as long as nobody knows.
        has_forward: the forward of the model itself counts as its code: it reads values behind its modules.
    """

    def __init__(self, function: Callable[..., Any], *, loss_reduction: str | None = None):
        functools.update_wrapper(self, function)
        self._function = function
        self.loss_reduction = loss_reduction
        self.may_read = _mentions_readers(function)
        self.weighs_labels: bool | None = None
        self.has_forward = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = _in_step_code.set(True)
        try:
            return self._function(*args, **kwargs)
        finally:
            _in_step_code.reset(token)


def assumed_loss(*outputs: Tensor) -> Tensor:
    """The assumed result, in a trace, of step-function code after the trace's end."""
    return torch.stack([output.sum().abs().double() for output in outputs]).sum()


def in_step_code() -> bool:
    """Whether code of a `ReadingStep` runs, and none of the model."""
    return _in_step_code.get()


@contextmanager
def code_of_model() -> Iterator[None]:
    """Inside, code of the model runs."""
    token = _in_step_code.set(False)
    try:
        yield
    finally:
        _in_step_code.reset(token)


def reads_values(func: Any) -> bool:
    """Whether a torch function gives Python the values of a tensor."""
    return func in READS_DATA or func in _WRITES_TEXT


def writes_text(func: Any) -> bool:
    """Whether a torch function writes the values of a tensor."""
    return func in _WRITES_TEXT


def asks_for_types(function: Any) -> bool:
    """Whether ``type()`` stands in a function, or in one of its own file that it calls: it tells a watched
    number from a number, so that what is asked of that behind it would not be seen.
    """
    return _is_found(_loads_type, function)


def _mentions_readers(function: Any) -> bool:
    """Whether a function calls what reads tensors, or a function of its own file does that it calls."""
    return _is_found(_loads_reader, function)


def _loads_reader(code: CodeType) -> bool:
    if (_READING_METHODS | _READING_BUILTINS).isdisjoint(code.co_names):
        return False
    return any(
        each.argval in (_READING_METHODS if each.opname in _LOADS_OF_ATTRIBUTES else _READING_BUILTINS)
        for each in dis.get_instructions(code)
        if each.opname in _LOADS_OF_ATTRIBUTES or each.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )


def _loads_type(code: CodeType) -> bool:
    if "type" not in code.co_names:  # of attributes, too: tensor.type()
        return False
    return any(each.opname == "LOAD_GLOBAL" and each.argval == "type" for each in dis.get_instructions(code))


def _is_found(is_meant: Callable[[CodeType], bool], function: Any, depth: int = _DEPTH) -> bool:
    """Whether the code of a function, or of one of its own file that it calls, is what is meant."""
    function = _plain_function(function)
    if function is None:
        return False
    parts = list(_with_inner(function.__code__))
    if any(map(is_meant, parts)):
        return True
    names = {name for part in parts for name in part.co_names}
    around = function.__globals__
    called = [around[name] for name in names if name in around]
    called += _contents_of_cells(function)
    # Only functions are asked for anything: other objects may do things when they are.
    called = [each.__func__ if type(each) is MethodType else each for each in called]
    own = (each for each in called if type(each) is FunctionType and each.__globals__ is around)
    return depth > 0 and any(_is_found(is_meant, each, depth - 1) for each in own)


def _plain_function(function: Any) -> FunctionType | None:
    """The function of a script behind a partial, a method or a decorator; None for other objects."""
    if isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, MethodType):
        function = function.__func__
    function = inspect.getattr_static(function, "__wrapped__", function)
    return function if isinstance(function, FunctionType) else None


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    """The code and that of functions, lambdas and comprehensions inside."""
    yield code
    for item in code.co_consts:
        if isinstance(item, CodeType):
            yield from _with_inner(item)


def _contents_of_cells(function: FunctionType) -> list[Any]:
    """The objects that a function has from the functions around it."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            continue  # it has no content yet
    return found
