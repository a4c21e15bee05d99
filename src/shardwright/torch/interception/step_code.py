"""Tells a step function's code from other code: its lines, its errors, whether it is traced.

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
from types import CodeType, FunctionType, MethodType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import ShardwrightError
from shardwright.torch.pytorch.functions import READS_DATA
from shardwright.torch.pytorch.modules import is_the_users

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
        divides_by_counts: its loss is divided by what it has counted in its own samples.
        clamps_counts: one of those is kept above a number.
        products: which operands of the products behind its loss are weights, by `LossWalk`.
        has_forward: the forward of the model itself counts as its code: it reads values behind its modules.
    """

    def __init__(self, function: Callable[..., Any], *, loss_reduction: str | None = None):
        functools.update_wrapper(self, function)
        self._function = function
        self.loss_reduction = loss_reduction
        self.may_read = _is_found(_loads_reader, function)
        self.weighs_labels: bool | None = None
        self.divides_by_counts = self.clamps_counts = False
        self.products: dict[Any, list[bool]] = {}
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
    for _ in range(2):  # a decorated method, or what decorates one
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


_SAID = "It is the script's or the model's own error"


def is_own(on_fake_data: Exception, on_random_data: Exception) -> bool:
    """Whether a unit raises by itself, and not for the data that it was traced on: twice the same kind."""
    return type(on_fake_data) is type(on_random_data) and not isinstance(on_random_data, ShardwrightError)


def point_out(error: Exception, module: nn.Module, name: str = "") -> None:
    """Adds the line and the layer to an error of the user's own code, once."""
    _add_note(error, f"{_SAID}, seen when the step was traced", module, name)


def point_out_in_run(error: Exception, module: nn.Module) -> None:
    """The same for an error of a step that runs; one that our own code raised is none of the user's."""
    modules = {id(sub) for sub in module.modules()}
    for traceback in reversed(list(_tracebacks(error))):
        frame = traceback.tb_frame
        if is_the_users(frame) or id(frame.f_locals.get("self")) in modules:
            _add_note(error, _SAID, module, "")
            return
        if frame.f_globals.get("__name__", "").startswith("shardwright."):
            return


def _add_note(error: Exception, said: str, module: nn.Module, name: str) -> None:
    if isinstance(error, ShardwrightError) or any(_SAID in note for note in getattr(error, "__notes__", ())):
        return
    names = {id(sub): ".".join(filter(None, (name, own))) for own, sub in module.named_modules()}
    line, layer = "", ""
    for traceback in _tracebacks(error):
        frame = traceback.tb_frame
        if is_the_users(frame):
            line = f": at {frame.f_code.co_filename}:{traceback.tb_lineno}"
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            layer = f", in {names[id(owner)] or 'the model'} ({type(owner).__name__})"
    error.add_note(f"{said}{line}{layer}.")


def _tracebacks(error: Exception) -> Iterator[TracebackType]:
    """From the outermost frame to the one that raised it."""
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


class _Marker:
    depth = 0


def is_tracing() -> bool:
    """Whether the step function, or a module of the model, runs only to see or to time what it does.

    The first step calls the step function a few more times than there are microbatches, and so does one
    whose batch has other shapes. What a script counts in variables of its own counts these calls, unless::

        if not sw.is_tracing():
            counter += 1
    """
    return _Marker.depth > 0


@contextmanager
def tracing() -> Iterator[None]:
    """Code of the script that runs inside runs for no batch."""
    _Marker.depth += 1
    try:
        yield
    finally:
        _Marker.depth -= 1
