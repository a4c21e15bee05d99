"""Models, and modules inside them, that the script has passed to `torch.compile`.

The wrapper that `torch.compile(module)` returns is removed. Parameter names are those without the wrapper,
and the module calls its compiled code itself, as after ``module.compile()``. Where a compiled module is
split, each unit inside it is compiled in the same way; units of one kind share the code.
"""

import inspect
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from shardwright.errors import UsageError
from shardwright.torch._private import compiler_of
from shardwright.torch.counting.cost_counter import class_key

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


def compile_units(model: nn.Module, names: Iterable[str]) -> None:
    """Compiles those units that are inside of a compiled module, as that is compiled."""
    for name in names:
        unit = model.get_submodule(name)
        parts = name.split(".")
        around = [model.get_submodule(".".join(parts[:n])) for n in range(len(parts), -1, -1)]
        compiled = next((module for module in around if is_compiled(module)), unit)
        if compiled is not unit:
            compiler = compiler_of(vars(compiled)["_compiled_call_impl"])
            if compiler is not None:
                _set_call(unit, _new_call(compiler, class_key(unit)))


def compile_as(twin: nn.Module, module: nn.Module) -> None:
    """Compiles a copy of a module, and the modules inside it, as the original: copies lose that."""
    for own, original in zip(twin.modules(), module.modules(), strict=True):
        compiled = vars(original).get("_compiled_call_impl")
        if isinstance(compiled, _CompiledCall):
            _set_call(own, compiled.function)
        elif compiled is not None and (compiler := compiler_of(compiled)) is not None:
            _set_call(own, _new_call(compiler, class_key(own)))


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


def _new_call(compiler: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """A compiled function that calls a module."""

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    call.__code__ = _CODES.setdefault(kind, call.__code__.replace())
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
            _set_call(module, _new_call(compiler, class_key(module)))
    return module
