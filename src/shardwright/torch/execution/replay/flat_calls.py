"""What runs between units: its lines of Python, and one call of a microbatch that is replayed."""

import dis
import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import greenlet
import torch
from torch import Tensor

import shardwright
from shardwright.torch.execution.replay.held_state import Binding, ImpureError, attribute_behind
from shardwright.torch.program.instructions import Instruction
from shardwright.torch.pytorch.tree import entries_of, leaves

# What PyTorch does in Python is its operations, which are seen as such, and the settings of its threads.
_TRUSTED = tuple(
    os.path.dirname(os.path.abspath(str(each.__file__))) + os.sep for each in (torch, shardwright, greenlet)
)
_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_NOT_FOLLOWED = ((), ("__class__",))  # the class around a method that uses super()
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "LOAD_SUPER_ATTR"})
_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device})


class CodeWatch:
    """The Python code that has run between units.

    Attributes:
        is_open: what runs now is between units.
        names: of attributes that it may have used.
        bindings: of global variables, and of variables of enclosing functions.
        failure: looking at an argument has raised this; empty else.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.names: set[str] = set()
        self.bindings: list[Binding] = []
        self.failure = ""
        self._lines: dict[CodeType, set[int]] = {}
        self._globals: dict[CodeType, dict[str, Any]] = {}
        self._enclosed: dict[CodeType, set[tuple[int, ...]]] = {}
        self._given: dict[int, Any] = {}
        self._is_watched: dict[CodeType, bool] = {}

    def begin(self) -> None:
        """Watches the code that this thread of control runs from now on."""
        sys.settrace(self._on_call)

    def end(self) -> None:
        sys.settrace(None)

    def given(self) -> list[Any]:
        """The objects that functions were given and that are still there, behind a microbatch; once."""
        # References: the dictionary's, the loop's, and that of the call.
        kept = [item for item in self._given.values() if sys.getrefcount(item) > 3]
        self._given.clear()
        return kept

    def resolve(self, roots: Iterable[Any]) -> None:
        """Finds what the lines that have run name."""
        if self.failure:
            raise ImpureError(self.failure)
        for code, lines in self._lines.items():
            self._read(code, lines)
        self._find_cells([*roots, *(binding.value for binding in self.bindings)])

    # ---- while it runs ----

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        try:
            return self._noted(frame)
        except Exception as error:  # an object that does things when it is looked at
            self.failure = f"{type(error).__name__}: {error}"
            return None

    def _noted(self, frame: FrameType) -> Any:
        code = frame.f_code
        watched = self._is_watched.get(code)
        if watched is None:
            watched = self._is_watched[code] = not code.co_filename.startswith(_TRUSTED)
        if not watched or not self.is_open:
            return None
        is_of_python = code.co_filename.startswith(_PYTHON) and "-packages" not in code.co_filename
        if is_of_python and frame.f_back is not None and frame.f_back.f_code.co_filename.startswith(_TRUSTED):
            return None  # a context manager of ours
        self._lines.setdefault(code, set())
        self._globals[code] = frame.f_globals
        held = frame.f_locals
        if code.co_freevars not in _NOT_FOLLOWED and not is_of_python:
            values = tuple(id(held.get(name)) for name in code.co_freevars)
            self._enclosed.setdefault(code, set()).add(values)
        flags = bool(code.co_flags & 4) + bool(code.co_flags & 8)
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + flags]:
            item = held.get(name)
            if type(item) not in _PLAIN and not isinstance(item, Tensor):
                self._given[id(item)] = item
        return self._on_line

    def _on_line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self._lines[frame.f_code].add(frame.f_lineno)
        return self._on_line

    # ---- afterwards ----

    def _read(self, code: CodeType, lines: set[int]) -> None:
        held = self._globals[code]
        instructions = list(_of_lines(code, lines))
        for number, instruction in enumerate(instructions):
            name, operation = instruction.argval, instruction.opname
            if operation in _ATTRIBUTES:
                self.names.add(name if isinstance(name, str) else name[-1])
            elif operation == "LOAD_CONST" and isinstance(name, str) and name.isidentifier():
                self.names.add(name)
            elif operation in _GLOBALS:
                line = instruction.positions.lineno if instruction.positions else 0
                where = f"{name} ({os.path.basename(code.co_filename)}:{line})"
                self._name(held, name, instructions[number + 1 :], where)
            elif operation in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                raise ImpureError(f"{code.co_qualname} sets the global variable {name}")
            elif operation in ("STORE_DEREF", "DELETE_DEREF") and name in code.co_freevars:
                if not any(name in other.co_cellvars for other in self._lines):
                    raise ImpureError(
                        f"{code.co_qualname} sets the variable {name} of the function around it"
                    )
            elif operation == "IMPORT_NAME" and name in sys.modules:
                module = sys.modules[name]
                for later in instructions[number + 1 :]:
                    if later.opname == "IMPORT_FROM":
                        self.bindings.append(attribute_behind(module, later.argval))
                    else:
                        break

    def _name(self, held: dict[str, Any], name: str, behind: list[dis.Instruction], where: str) -> None:
        """Follows a global variable, through modules."""
        if name not in held:
            builtins = held.get("__builtins__", {})
            held = builtins if isinstance(builtins, dict) else vars(builtins)
        binding = Binding(where, held, name)
        while binding.is_open_module and behind and behind[0].opname in _ATTRIBUTES:
            attribute = behind[0].argval
            binding.is_followed = True
            self.bindings.append(binding)
            binding = attribute_behind(binding.value, attribute)
            behind = behind[1:]
        self.bindings.append(binding)

    def _find_cells(self, roots: Iterable[Any]) -> None:
        """Finds the cells of the functions that were called, by the values that these had."""
        found: dict[CodeType, set[tuple[int, ...]]] = {}
        for function in _functions_behind(roots) if self._enclosed else ():
            code, cells = function.__code__, function.__closure__ or ()
            values = tuple(id(cell.cell_contents) if _is_full(cell) else id(None) for cell in cells)
            if values in self._enclosed.get(code, ()):
                found.setdefault(code, set()).add(values)
                named = zip(code.co_freevars, cells, strict=True)
                self.bindings += [Binding(name, cell, "") for name, cell in named if _is_full(cell)]
        made_here = {const for code in self._lines for const in code.co_consts if isinstance(const, CodeType)}
        for code, values_seen in self._enclosed.items():
            if code not in made_here and values_seen - found.get(code, set()):
                raise ImpureError(f"the variables around {code.co_qualname} cannot be followed")


def _functions_behind(roots: Iterable[Any]) -> Iterator[FunctionType]:
    """The functions that code can get at, and what decorators have wrapped."""
    rest, seen = list(roots), set[int]()
    while rest:
        item = rest.pop()
        if id(item) in seen or isinstance(item, Tensor):
            continue
        seen.add(id(item))
        if isinstance(item, FunctionType):
            yield item
            rest += [cell.cell_contents for cell in item.__closure__ or () if _is_full(cell)]
            rest += [getattr(item, "__wrapped__", None), *(item.__defaults__ or ())]
        elif isinstance(item, MethodType):
            rest += [item.__func__, item.__self__]
        elif isinstance(item, functools.partial):
            rest += [item.func, *item.args, *item.keywords.values()]
        elif isinstance(item, staticmethod | classmethod | functools._lru_cache_wrapper):
            rest.append(item.__wrapped__)
        elif isinstance(item, property):
            rest.append(item.fget)
        elif isinstance(item, functools.cached_property):
            rest.append(item.func)
        elif isinstance(item, list | tuple | dict):
            held = item.values() if isinstance(item, dict) else item
            rest += [type(item), *(each for each in held if callable(each))]
        elif isinstance(item, type):
            if not item.__module__.startswith(("torch.", "builtins")):
                rest += [*vars(item).values(), *item.__mro__]
        elif not isinstance(item, ModuleType):
            rest += [type(item), *filter(callable, entries_of(item).values())]


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _of_lines(code: CodeType, lines: set[int]) -> Iterator[dis.Instruction]:
    for instruction in dis.get_instructions(code):
        positions = instruction.positions
        if positions is not None and positions.lineno in lines:
            yield instruction


@dataclass(slots=True)
class FlatCall:
    """One call.

    Attributes:
        gather: gives the leaves of its arguments from the places.
        arguments: makes (args, kwargs) of them; None where they are all by position.
        instruction: None for a free operation that the trace does not have.
        cuts: (leaf, value of another stage), where nothing else must be found.
        finds: arguments must be found in another way, too.
        keeps: something of its result is kept, or compared with the trace.
        place: of its result, where that is one tensor; -1 where nobody needs it.
        places: (leaf of the result, place), where it is not.
        last_uses: places that nobody needs any more.
    """

    run: Callable[..., Any]
    gather: Callable[[list[Any]], tuple[Any, ...]]
    arguments: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]] | None
    instruction: Instruction | None
    position: int
    cuts: tuple[tuple[int, int], ...]
    finds: bool
    draws: bool
    keeps: bool
    place: int
    places: tuple[tuple[int, int], ...]
    last_uses: tuple[int, ...]
    is_free: bool


def run_calls(running: Any, turn: int | None) -> None:
    for context, calls in running.flat.turns.get(turn, ()):
        if context is None:
            _run(running, calls)
        else:
            with context():
                _run(running, calls)


def _run(running: Any, calls: Sequence[FlatCall]) -> None:
    places, tensors, generators = running.places, running.tensors, running.generators
    for call in calls:
        instruction = call.instruction
        items: Any = call.gather(places)
        if call.cuts:
            assert instruction is not None
            items = list(items)
            for position, value in call.cuts:
                leaf = tensors.leaf(value, instruction.stage)
                items[position] = leaf[...] if leaf.requires_grad else leaf
        args, kwargs = (items, _NO_NAMES) if call.arguments is None else call.arguments(items)
        if call.draws:
            assert instruction is not None
            generators.before_step(instruction, call.position)
        if call.is_free:
            begun_s = time.perf_counter()
            result = call.run(*args, **kwargs)
            running.outside_s += time.perf_counter() - begun_s
        else:
            assert instruction is not None
            copied: dict[int, Tensor] = {}
            if call.finds:
                args, kwargs, copied = tensors.find(instruction, args, kwargs)
            if instruction.offload:
                with running.keeping(instruction):
                    result = call.run(*args, **kwargs)
            else:
                result = call.run(*args, **kwargs)
            if call.keeps:
                tensors.keep(instruction, result, args, kwargs, copied)
        if call.draws:
            generators.after_step(instruction)
        if call.place >= 0:
            places[call.place] = result
        elif call.places:
            items = leaves(result)
            for position, place in call.places:
                places[place] = items[position]
        for place in call.last_uses:
            places[place] = None


_NO_NAMES: dict[str, Any] = {}
