"""What a trace must not leave behind: fake tensors, and changes of real ones.

In a trace units compute on fake tensors. One that a forward puts away for later would be found there by a
real forward. `trace_guard` puts back the attributes of modules; here fake tensors are taken out of everything
else that forwards use for this: objects, globals, classes, ``lru_cache``. Real tensors may stay: code between
units computes them in a trace, too. Those of modules and their objects may be changed in place: they get
their content back.
"""

import functools
import gc
import sys
import weakref
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.torch._private import FakeTensor

__all__ = ["NothingLeftBehind"]

_DEPTH = 3
_PLAIN = frozenset({type(None), bool, int, float, str, bytes, complex})
_LONGEST = 4096  # longer ones are data: a vocabulary, a list of files
_LruCache: Any = type(functools.lru_cache(lambda: None))
_SKIPPED = (nn.Module, Tensor, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_NOT_OURS = ("torch.", "builtins.", "typing.", "collections.", "functools.")


class NothingLeftBehind:
    """Puts things back at its end as they were when it was made.

    Args:
        model: the whole model.
        function: the step function.
    """

    def __init__(self, model: nn.Module, function: Callable[..., Any]):
        self._model = model
        self._tensors: list[tuple[Tensor, Tensor, int]] = []
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._classes: list[tuple[type, dict[str, Any]]] = []
        self._seen: set[int] = set()
        self._look_around(model, function)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        for now, before in self._dicts:
            for key in [key for key, item in now.items() if _holds_fake(item)]:
                if key not in before:
                    del now[key]
                elif now[key] is not before[key]:
                    now[key] = before[key]
        for items, earlier in self._lists:
            if any(map(_holds_fake, items)):
                items[:] = earlier
        for kind, names in self._classes:
            for name in [name for name, item in vars(kind).items() if _holds_fake(item)]:
                if name not in names:
                    delattr(kind, name)
                elif vars(kind)[name] is not names[name]:
                    setattr(kind, name, names[name])
        for tensor, content, version in self._tensors:
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(content)
        for cache in _lru_caches(self._model):
            # The garbage collector sees what is in it: results, and tuples and dictionaries of them.
            if cache.cache_info().currsize and any(map(_holds_fake, gc.get_referents(cache))):
                cache.cache_clear()

    def _look_around(self, model: nn.Module, function: Callable[..., Any]) -> None:
        namespaces = [getattr(function, "__globals__", {})]
        for module in model.modules():
            for key, item in vars(module).items():
                if key not in _TENSORS_OF_ITS_OWN:
                    self._look_into(item, _DEPTH, tensors=True)
            for kind in type(module).__mro__:
                if not _is_of(kind, _NOT_OURS) and id(kind) not in self._seen:
                    self._seen.add(id(kind))
                    self._classes.append((kind, dict(vars(kind))))
                    for item in vars(kind).values():
                        self._look_into(item, _DEPTH - 1)
                    namespaces.append(vars(sys.modules.get(kind.__module__, sys)))
        for namespace in namespaces:
            self._look_into(namespace, _DEPTH - 1)

    def _look_into(self, item: Any, depth: int, *, tensors: bool = False) -> None:
        """Takes note of containers, and of what they and plain objects hold.

        Args:
            item: an object.
            depth: how far to look into it.
            tensors: keep the content of tensors.
        """
        if tensors and isinstance(item, Tensor) and id(item) not in self._seen and _is_real(item):
            self._seen.add(id(item))
            self._tensors.append((item, item.detach().clone(), item._version))
        if type(item) in _PLAIN or isinstance(item, _SKIPPED) or id(item) in self._seen or depth == 0:
            return
        self._seen.add(id(item))
        if isinstance(item, dict | list | tuple) and len(item) > _LONGEST:
            return
        if isinstance(item, dict):
            held = list(item.values())
            self._dicts.append((item, dict(item)))
        elif isinstance(item, list):
            held = list(item)
            self._lists.append((item, held))
        elif isinstance(item, tuple):
            held = list(item)
        elif _is_plain_object(item):
            held = [vars(item)]
            depth += 1  # its namespace is not one more step
        else:
            return
        for inner in held:
            self._look_into(inner, depth - 1, tensors=tensors)


# `trace_guard` sees to parameters and buffers.
_TENSORS_OF_ITS_OWN = frozenset({"_parameters", "_buffers"})


def _is_real(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and not tensor.is_meta and not tensor.is_inference()


def _is_of(kind: type, prefixes: tuple[str, ...]) -> bool:
    return f"{kind.__module__}.".startswith(prefixes)


def _is_plain_object(item: Any) -> bool:
    return not _is_of(type(item), _NOT_OURS) and isinstance(getattr(item, "__dict__", None), dict)


def _holds_fake(item: Any, depth: int = _DEPTH) -> bool:
    if isinstance(item, FakeTensor):
        return True
    if depth == 0 or not isinstance(item, dict | list | tuple | set) or len(item) > _LONGEST:
        return False
    held = item.values() if isinstance(item, dict) else item
    return any(_holds_fake(inner, depth - 1) for inner in held)


_caches: weakref.WeakKeyDictionary[nn.Module, tuple[int, list[Any]]] = weakref.WeakKeyDictionary()


def _lru_caches(model: nn.Module) -> list[Any]:
    """All that there are; they come with Python modules, and with the model."""
    imported, found = _caches.get(model, (0, []))
    if imported != len(sys.modules):
        found = [item for item in gc.get_objects() if type(item) is _LruCache]
        _caches[model] = len(sys.modules), found
    return found
