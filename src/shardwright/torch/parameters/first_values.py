"""First values of parameters and buffers, also where other ranks hold the tensors around them.

An ordinary build of a module runs, in this order: its own ``reset_parameters`` (PyTorch's modules and many
others), then ``_init_weights(module)`` of the enclosing model for every module from the innermost outwards
(Hugging Face transformers, timm, and many scripts: ``self.apply(self._init_weights)``). Both are methods that
can be called again once there is memory.

Each module's initialisation runs on the meta device, where it computes nothing, and its writes are watched.

::

    root._init_weights(root):  for layer in self.layers: layer.weight.normal_()

    one process     draws  0 0 0 1 1 1 2 2 2 3 3 3
    rank 1 of 2     draws  . . . . . . 2 2 2 3 3 3     the dots are drawn, and thrown away

So what a module draws for one tensor does not depend on the ranks that hold the others. A tensor on the meta
device would not do: nothing is drawn for it, and some of PyTorch's initialisers leave it out. Others draw
again what lies too far from the mean, so that values count: what is being filled has memory, one at a time.
"""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.errors import UsageError
from shardwright.torch._private.tensors import disabled_torch_function, make_wrapper, storage_key
from shardwright.torch.parameters.delayed_initialization import is_recorded
from shardwright.torch.pytorch.functions import map_arguments, tensors_in, written_tensors
from shardwright.torch.pytorch.tree import map_tree

Initialise = Callable[[nn.Module], Any]


def initialise(module: nn.Module, above: Sequence[nn.Module], extra: Initialise | None = None) -> None:
    """Has a module fill the parameters and buffers that are registered on it."""
    for name in ("reset_parameters", "_reset_parameters"):
        method = getattr(module, name, None)
        if callable(method):
            method()
            break
    initialise_container(module, above)
    if extra is not None:
        extra(module)


def initialise_container(module: nn.Module, above: Sequence[nn.Module]) -> None:
    """Has the innermost model around a module do what it does to this module when it is built."""
    for model in above:
        method = getattr(model, "_init_weights", None)
        if callable(method) and _takes_a_module(method):
            method(module)
            return


def children_first(model: nn.Module) -> list[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    """Every module with its name and the modules that it is in, itself included, innermost first."""
    found: list[tuple[str, nn.Module, tuple[nn.Module, ...]]] = []
    seen: set[int] = set()

    def visit(name: str, module: nn.Module, above: tuple[nn.Module, ...]) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        above = (module, *above)
        for key, child in module.named_children():
            visit(f"{name}.{key}" if name else key, child, above)
        found.append((name, module, above))

    visit("", model, ())
    return found


def _takes_a_module(method: Callable[..., Any]) -> bool:
    try:
        inspect.signature(method).bind(None)
    except (TypeError, ValueError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class Unknown:
    """A module with tensors that nothing fills."""

    name: str
    class_name: str
    missing: tuple[str, ...]

    def __str__(self) -> str:
        return f"{', '.join(self.missing)} of {self.class_name} ({self.name or 'the model itself'})"


def unknown_values(model: nn.Module) -> list[Unknown]:
    """Modules with meta tensors (parameters, buffers, plain attributes) that keep no values when filled."""
    found = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for name, module, above in children_first(model):
            if not any(tensor.is_meta and not is_recorded(tensor) for tensor in _held(module).values()):
                continue
            missing = _missing(module, above)
            if missing:
                found.append(Unknown(name, type(module).__name__, missing))
    return found


def _missing(module: nn.Module, above: tuple[nn.Module, ...]) -> tuple[str, ...]:
    before = _held(module)
    attributes = dict(vars(module))
    registries = [(r, dict(r)) for r in (module._parameters, module._buffers)]
    watch = _Writes()
    try:
        with watch:
            initialise(module, above)
        after = _held(module)
    except Exception:
        return ()
    finally:
        vars(module).clear()
        vars(module).update(attributes)
        for registry, content in registries:
            registry.clear()
            registry.update(content)  # type: ignore[arg-type]
    return tuple(
        key
        for key, tensor in before.items()
        if tensor.is_meta
        and not is_recorded(tensor)
        and after.get(key) is tensor
        and storage_key(tensor) not in watch.written
    )


def _held(module: nn.Module) -> dict[str, Tensor]:
    """Tensors of a module: parameters and buffers that are registered on it, and plain attributes."""
    found = {**vars(module), **module._parameters, **module._buffers}
    return {key: value for key, value in found.items() if isinstance(value, Tensor)}


class _Writes(TorchDispatchMode):
    """Notes the storages that operations write to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, Tensor):
                with contextlib.suppress(NotImplementedError):  # a tensor without storage
                    self.written.add(storage_key(value))
        return func(*args, **(kwargs or {}))


class Elsewhere:
    """The tensors of other ranks that a module finds in its parts."""

    def __init__(self, device: torch.device):
        self._device = device
        self._filled: _Memory | None = None

    def stand_in(self, tensor: Tensor) -> Tensor:
        """Stands for a parameter or a buffer: whatever is written to it is lost."""
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        made = _StandIn(meta, _Memory(self, self._device))
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    def fills(self, memory: "_Memory") -> None:
        """From now on this one has memory, and no other."""
        if self._filled is not None and self._filled is not memory:
            self._filled.content = None
        self._filled = memory


class _Memory:
    """The memory of a stand-in and of its views: there from when it is filled until another one is."""

    def __init__(self, place: Elsewhere, device: torch.device):
        self.content: Tensor | None = None  # all of it, in one dimension
        self.device = device
        self._place = place

    def take(self, like: Tensor) -> None:
        """Takes memory for a tensor, or the one that a view looks at."""
        self._place.fills(self)
        if self.content is None:
            length = like.untyped_storage().nbytes() // like.element_size()
            self.content = torch.zeros(length, dtype=like.dtype, device=self.device)


class _StandIn(torch.Tensor):
    """See `Elsewhere`."""

    _meta: Tensor
    _memory: _Memory

    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, meta: Tensor, memory: _Memory) -> "_StandIn":
        made: _StandIn = make_wrapper(cls, meta, device=memory.device)
        made._meta, made._memory = meta, memory
        return made

    def __init__(self, meta: Tensor, memory: _Memory) -> None:
        super().__init__()

    @property
    def data(self) -> Tensor:
        """The tensor without its history."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """What is put in its place is lost, too."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        written = written_tensors(func, args, kwargs)
        lost = [item for item in written if isinstance(item, cls)]
        if written and len(lost) == len(written):
            _write(lost, func, args, kwargs)
            return lost[0] if len(func._schema.returns) == 1 else tuple(lost)
        found = [item for item in tensors_in([*args, *kwargs.values()]) if isinstance(item, cls)]
        if not written and any(result.alias_info is not None for result in func._schema.returns):
            views = func(*map_arguments(_meta_of, args, {})[0], **kwargs)
            return map_tree(lambda item: _view(item, found[0]._memory), views)
        if not written and _looks_at_shapes_alone(func):
            return _on(_blank, func, args, kwargs)
        if any(item._memory.content is None for item in found):
            raise UsageError(
                "a model on the meta device gets first values, and one of its modules computes some of "
                f"them from those of a parameter that another rank holds ({func}). Build the model under "
                "sw.delay_param_initialization() instead."
            )
        return _on(_content, func, args, kwargs)


def _write(written: list["_StandIn"], func: Any, args: Any, kwargs: Any) -> None:
    """Writes to stand-ins that are being filled; what is written to others is lost."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        for item in written:
            item._memory.take(item._meta)
    used = [item for item in tensors_in([*args, *kwargs.values()]) if isinstance(item, _StandIn)]
    if all(item._memory.content is not None for item in used):
        _on(_content, func, args, kwargs)
    else:
        for item in written:
            item._memory.content = None  # nobody knows what it would be


def _on(tensor_of: Callable[["_StandIn"], Tensor], func: Any, args: Any, kwargs: Any) -> Any:
    own, named = map_arguments(
        lambda item: tensor_of(item) if isinstance(item, _StandIn) else item, args, kwargs
    )
    return func(*own, **named)


def _content(item: "_StandIn") -> Tensor:
    assert item._memory.content is not None
    meta = item._meta
    return item._memory.content.as_strided(meta.shape, meta.stride(), meta.storage_offset())


def _blank(item: "_StandIn") -> Tensor:
    """Laid out alike: the order of draws goes by it."""
    return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=item.device)


def _meta_of(item: Tensor) -> Tensor:
    return item._meta if isinstance(item, _StandIn) else item


def _view(item: Any, memory: _Memory) -> Any:
    return _StandIn(item, memory) if isinstance(item, Tensor) else item


def _looks_at_shapes_alone(func: Any) -> bool:
    name: str = func._schema.name.removeprefix("aten::")
    return name.startswith("new_") or name.endswith("_like")
