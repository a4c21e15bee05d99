"""Modules that are compiled or have hooks: what of them belongs to a computation.

The wrapper that `torch.compile(module)` returns is removed. Parameter names are those without the wrapper,
and the module calls its compiled code itself, as after ``module.compile()``. Where a compiled module is
split, each unit inside it is compiled in the same way; units of one kind share the code. The setting
`compile` has a model compiled so, with code that cannot be compiled as Python wrote it.

A unit runs many times to be timed. Hooks that count, print or collect must not see these runs, yet the unit
must be timed with the hooks that belong to its computation::

    hook                                                        runs while a unit is measured
    PyTorch's own (weight_norm, spectral_norm, pruning)         yes
    uses a context variable (`unit_attributes`)                 yes: what it collects leaves the unit
    of the unit itself                                          no: it runs around the unit, as glue
    any other, and all for gradients                            no

Hooks that collect are there also where the traced step function alone has registered them, as transformers
does in the first forward that wants their lists: a trace leaves no hooks behind.

A forward that fails without the other hooks (it needs what they return, or leave somewhere) is measured with
them.
"""

import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from shardwright.errors import UsageError
from shardwright.plan import Plan
from shardwright.run.context import Context
from shardwright.torch._private.modules import (
    code_being_compiled,
    compile_with_backward,
    compiler_of,
    hooks_of_every_module,
    is_for_compiler,
)
from shardwright.torch.counting.cost_counter import class_key
from shardwright.torch.interception.compiled_code import look_for_compiled_code
from shardwright.torch.interception.unit_attributes import collects

log = logging.getLogger(__name__)

_PREFIX = "_orig_mod."


def without_compilers(module: nn.Module) -> nn.Module:
    """Takes the wrappers of `torch.compile` off a model and the modules inside it; returns the model."""
    whole = _unwrapped(module, "the model")
    for name, outer in list(whole.named_modules()):
        for key, inner in outer._modules.items():
            if inner is not None and _is_wrapper(inner):
                outer._modules[key] = _unwrapped(inner, f"{name}.{key}" if name else key)
    return whole


def without_prefixes(state: Any) -> Any:
    """A state whose names may be those of compiled modules, with the names of the modules themselves."""
    if not any(_PREFIX in str(name) for name in state):
        return state
    return {name.replace(_PREFIX, ""): value for name, value in state.items()}


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of this module run compiled code, where any is run."""
    return vars(module).get("_compiled_call_impl") is not None


def calls_compiled(module: nn.Module) -> bool:
    """Whether a module's forward is or names a compiled function, or flex attention, which compiles.

    Between units it would run as Python wrote it; inside a unit it is compiled.
    """
    given: Any = type(module).forward
    if _is_compiled_function(given):
        return True
    forward = inspect.unwrap(given)
    code = getattr(forward, "__code__", None)
    if code is None:
        return False
    around = inspect.getclosurevars(forward) if code.co_freevars else None
    known = {**forward.__globals__, **(around.nonlocals if around is not None else {})}
    named = [*code.co_names, *code.co_freevars]
    found = [known[name] for name in named if name in known]
    inside = [item for item in found if isinstance(item, ModuleType)]
    found += [vars(item)[name] for item in inside for name in named if name in vars(item)]
    own = {**vars(type(module)), **vars(module)}
    found += [own[name] for name in named if name in own]
    return any(_is_compiled_function(item) for item in found)


def _is_compiled_function(item: Any) -> bool:
    if not isinstance(item, FunctionType):
        return False
    is_flex = item.__module__ == "torch.nn.attention.flex_attention" and item.__name__ == "flex_attention"
    return is_flex or compiler_of(item) is not None


def compile_units(model: nn.Module, names: Iterable[str], *, alone: bool = False) -> None:
    """Compiles those units that are inside of a compiled module, as that is compiled.

    Args:
        alone: the modules around them are no longer compiled.
    """
    outside: set[nn.Module] = set()
    for name in names:
        unit = model.get_submodule(name)
        parts = name.split(".")
        around = [model.get_submodule(".".join(parts[:n])) for n in range(len(parts), -1, -1)]
        compiled = next((module for module in around if is_compiled(module)), unit)
        if compiled is not unit:
            compiler = compiler_of(vars(compiled)["_compiled_call_impl"])
            if compiler is not None:
                _set_call(unit, _new_call(compiler, unit))
        outside.update(around[1:])
    for module in outside if alone else ():
        vars(module)["_compiled_call_impl"] = None


BACKEND = "inductor"

_told: set[str] = set()


def auto_compiles(device: torch.device) -> bool:
    """Whether compiled code may be faster on a device."""
    return device.type == "cuda"


def compile_as_wished(model: nn.Module, context: Context, plan: Plan | None = None) -> None:
    """Compiles a model as the setting `compile` asks for, or, once there is a plan, as that does."""
    wished = context.config.compile
    auto = wished == "auto" and auto_compiles(context.device)
    if wished == "on" if plan is None else auto and plan.compiled:
        share = context.mesh.share
        if share == 1:
            compile_whole(model)
        elif context.rank == 0:
            log.warning(
                "compile has no effect: a compiler does not see how %d ranks share a layer's tensors. All "
                "units run as written.",
                share,
            )


def compile_whole(model: nn.Module) -> None:
    """Compiles a model, but for what the script has compiled in it."""
    if not is_compiled(model):
        model.compile(backend=_or_as_written)
        look_for_compiled_code()


def _or_as_written(graph: Any, inputs: Any) -> Any:
    """A backend of `torch.compile` that says what it cannot compile, and has that run as it is."""
    try:
        return compile_with_backward(BACKEND, graph, inputs)
    except Exception as error:
        if is_for_compiler(error):
            raise
        kind = code_being_compiled()
        if kind not in _told:
            _told.add(kind)
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            log.warning("%s runs as written: %s cannot compile it: %s", kind, BACKEND, why)
        return graph.forward


def compile_as(twin: nn.Module, module: nn.Module) -> None:
    """Compiles a copy of a module, and the modules inside it, as the original: copies lose that."""
    for own, original in zip(twin.modules(), module.modules(), strict=True):
        compiled = vars(original).get("_compiled_call_impl")
        if isinstance(compiled, _CompiledCall):
            _set_call(own, compiled.function)
        elif compiled is not None and (compiler := compiler_of(compiled)) is not None:
            _set_call(own, _new_call(compiler, own))


class _CompiledCall:
    """Calls the compiled form of a module."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]):
        self._module = module
        self.function = function
        # `compiler_of` looks for it as on what `torch.compile` makes.
        self.dynamo_ctx = compiler_of(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self._module, *args, **kwargs)


def _set_call(module: nn.Module, function: Callable[..., Any]) -> None:
    vars(module)["_compiled_call_impl"] = _CompiledCall(module, function)


def _new_call(compiler: Callable[..., Any], unit: nn.Module) -> Callable[..., Any]:
    """A compiled function that calls modules of a kind, and is called as their class."""

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    code = call.__code__.replace(co_name=type(unit).__name__)
    call.__code__ = _CODES.setdefault(class_key(unit), code)
    compiled: Callable[..., Any] = compiler(call)
    return compiled


_CODES: dict[str, CodeType] = {}
"""Of each kind of module: what is compiled is kept with the code."""


def _is_wrapper(module: nn.Module) -> bool:
    return compiler_of(module) is not None and isinstance(module._modules.get("_orig_mod"), nn.Module)


def _unwrapped(module: nn.Module, name: str) -> nn.Module:
    """The module inside of wrappers of compilers: the innermost compiler has it."""
    while _is_wrapper(module):
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            raise UsageError(
                f"{name} was given to torch.compile(module), and what that returned has hooks. They would be "
                "lost, because Shardwright goes on with the module itself, compiled all the same. Register "
                "them on the module before it is compiled, or compile it by module.compile()."
            )
        compiler = compiler_of(module)
        module = module._modules["_orig_mod"]  # type: ignore[assignment]
        if compiler is not None and not is_compiled(module):
            _set_call(module, _new_call(compiler, module))
    return module


T = TypeVar("T")

_BEFORE, _AFTER = "_forward_pre_hooks", "_forward_hooks"
_LIBRARIES = ("torch", "shardwright")
_FOR_GRADIENTS = ("_backward_pre_hooks", "_backward_hooks")


class HookEffects:
    """Runs modules without the hooks that only look on."""

    def __init__(self) -> None:
        self._collecting: dict[nn.Module, list[Any]] = {}
        self._told: set[str] = set()

    def note_call(self, unit: nn.Module) -> None:
        """Takes note of the hooks inside a unit that collect, as the step function has registered them."""
        for module in unit.modules():
            if module is not unit and (
                own := [hook for hook in module._forward_hooks.values() if collects(hook)]
            ):
                self._collecting[module] = own

    def unseen(self, func: Any, call: Callable[[], T]) -> T:
        """Calls something with hooks that only look on put aside, or with those that its forward needs."""
        if not isinstance(func, nn.Module):
            return call()
        try:
            with _hooks_alone(func, _takes_part, self._collecting):
                result = call()
            if any(self._looks_on_inside(func)) and class_key(func) not in self._told:
                self._told.add(class_key(func))
                log.info("%s: forward hooks inside it are neither timed nor counted", type(func).__name__)
            return result
        except Exception:
            if not any(self._looks_on_inside(func)):
                raise
        with _hooks_alone(func, lambda hook: True, self._collecting):
            return call()

    @contextmanager
    def aside(self, units: Iterable[nn.Module]) -> Iterator[None]:
        """Inside, hooks of units that only look on do not run, nor do those of what is copied from them."""
        with ExitStack() as put_back:
            for unit in units:
                put_back.enter_context(_hooks_alone(unit, _takes_part, self._collecting))
            yield

    def looks_on(self, units: Iterable[nn.Module]) -> bool:
        """Whether units have forward hooks inside that only look on."""
        return any(any(self._looks_on_inside(unit)) for unit in units)

    def _looks_on_inside(self, unit: nn.Module) -> Iterator[bool]:
        for module in unit.modules():
            if module is not unit:
                for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
                    yield not _takes_part(hook)


def _takes_part(hook: Any) -> bool:
    return _is_of_a_library(hook) or collects(_function_of(hook))


@contextmanager
def _hooks_alone(
    unit: nn.Module, stays: Callable[[Any], bool], collecting: Mapping[nn.Module, Sequence[Any]]
) -> Iterator[None]:
    """Inside, a unit has hooks of libraries, and modules inside it forward hooks that stay; no others."""
    with ExitStack() as put_back:
        for registry in hooks_of_every_module():
            put_back.callback(registry.update, dict(registry))
            registry.clear()
        for module in unit.modules():
            for name in (_BEFORE, _AFTER, *_FOR_GRADIENTS):
                keep = _is_of_a_library if module is unit or name in _FOR_GRADIENTS else stays
                registry = getattr(module, name)
                added = collecting.get(module, ()) if name == _AFTER else ()
                added = () if any(map(collects, registry.values())) else added
                if added or not all(map(keep, registry.values())):
                    kept = OrderedDict((number, hook) for number, hook in registry.items() if keep(hook))
                    kept.update((-number, hook) for number, hook in enumerate(added, start=1))
                    put_back.callback(setattr, module, name, registry)
                    setattr(module, name, kept)
        yield


def hooks_of(model: nn.Module) -> list[Callable[..., Any]]:
    """The forward hooks of a model, as functions, without those of PyTorch and of this library."""
    return [
        _function_of(hook)
        for module in model.modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if not _is_of_a_library(hook)
    ]


def _function_of(hook: Any) -> Callable[..., Any]:
    """A function, with variables of its own: of an object that is called, its method."""
    found: Callable[..., Any] = (
        hook if hasattr(hook, "__code__") or isinstance(hook, partial) else hook.__call__
    )
    return found


def _is_of_a_library(hook: Any) -> bool:
    """Whether a hook is a function of PyTorch or ours, or an object of a class of theirs or of a child."""
    while isinstance(hook, partial):
        hook = hook.func
    hook = getattr(hook, "__self__", hook)  # of a method
    if isinstance(hook, nn.Module):
        kinds: tuple[Any, ...] = (type(hook),)  # any module's class is a child of PyTorch's
    else:
        kinds = (hook,) if hasattr(hook, "__code__") else type(hook).__mro__
    return any(str(kind.__module__).partition(".")[0] in _LIBRARIES for kind in kinds)
