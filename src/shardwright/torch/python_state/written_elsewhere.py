"""What other threads of a script, and its signal handlers, write to while a step function is traced.

A trace puts back what it finds changed in variables. What a thread that loads batches has counted meanwhile,
or that a signal has asked the script to end, must stay. Who has changed a variable is not seen; but the code
that other threads run, and that of signal handlers, tells which names it writes to.

That is more than it changes: all variables of this name count, and all names of a function that calls
``append`` or the like. Of such a variable, what the trace itself has counted stays as well. And it is less: a
thread that waits for work (of a pool, of a timer) does not show what it will run, nor does a handler that is
no function or method.
"""

import dis
import signal
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

from shardwright.torch.pytorch.script_code import is_script_file

__all__ = ["names_written_elsewhere"]

_WRITES = frozenset({"STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_ATTR", "DELETE_GLOBAL"})
_WRITES_ENTRY = frozenset({"STORE_SUBSCR", "DELETE_SUBSCR"})
_CHANGE = frozenset(
    "add append appendleft clear discard extend insert pop popitem popleft remove setdefault update".split()
    # Generators of random numbers.
    + "choice choices integers normal permutation rand randint randn random randrange sample shuffle".split()
)
_MOST_FUNCTIONS = 200


def names_written_elsewhere() -> frozenset[str]:
    """Names of variables, attributes and entries to which other threads and signal handlers may write."""
    found = _Names()
    own = threading.get_ident()
    for thread, frame in sys._current_frames().items():
        if thread != own:
            for each in (each for each in _stack(frame) if is_script_file(each.f_code.co_filename)):
                first = each.f_code.co_varnames[0] if each.f_code.co_argcount else None
                owner = type(each.f_locals.get(first)) if first else None
                found.look_at(each.f_code, each.f_globals, owner)
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        owner = None
        if type(handler) is MethodType:
            owner, handler = type(handler.__self__), handler.__func__
        if type(handler) is FunctionType:
            found.look_at(handler.__code__, handler.__globals__, owner)
    return frozenset(found.names)


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


class _Names:
    """Collects names to which code of a script writes, and functions and methods that it calls."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._seen: set[tuple[CodeType, type | None]] = set()

    def look_at(self, code: CodeType, around: dict[str, Any], owner: type | None) -> None:
        """Takes note of the names of a function.

        Args:
            code: the function's.
            around: the variables of its file.
            owner: the class of which it may be a method.
        """
        if not is_script_file(code.co_filename):
            return
        if (code, owner) in self._seen or len(self._seen) == _MOST_FUNCTIONS:
            return
        self._seen.add((code, owner))
        steps = list(dis.get_instructions(code))
        self.names.update(step.argval for step in steps if step.opname in _WRITES)
        writes_entry = any(step.opname in _WRITES_ENTRY for step in steps)
        if writes_entry or not _CHANGE.isdisjoint(code.co_names):
            texts = (item for item in code.co_consts if type(item) is str)
            self.names.update(code.co_names, code.co_freevars, code.co_cellvars, texts)
        for name in code.co_names:
            methods = (vars(kind).get(name) for kind in (owner.__mro__ if owner is not None else ()))
            for called, its_owner in ((around.get(name), None), (next(filter(None, methods), None), owner)):
                if type(called) is FunctionType:
                    self.look_at(called.__code__, called.__globals__, its_owner)
        for item in code.co_consts:
            if isinstance(item, CodeType):
                self.look_at(item, around, owner)
