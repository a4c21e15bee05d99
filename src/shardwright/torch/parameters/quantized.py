"""Quantized weights as plain parts, which move, are cut into shards and are counted as other tensors are.

A weight of torchao or bitsandbytes in 4 or 8 bits is a tensor of a class of its own, around plain ones::

    linear.weight    Int8Tensor    ──>    linear.weight_parts.qdata    int8       (16, 64)
                                          linear.weight_parts.scale    float32    (16, 1)

The module keeps the parts, frozen, and puts the weight together whenever it is asked for.
"""

import copy
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Self

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardwright.errors import UsageError
from shardwright.run.context import Context
from shardwright.torch.parameters.parameter_kinds import low_precision

_Parts = Mapping[str, Tensor]
_Build = Callable[[_Parts], Tensor]
_Taken = tuple[_Parts, _Build, tuple[int, ...]]


class _PartsOfWeight(nn.Module):
    """The parts of one weight, which is of this shape."""

    def __init__(self, parts: _Parts, build: _Build, shape: tuple[int, ...]):
        super().__init__()
        self.shape = shape
        for name, part in parts.items():
            self.register_parameter(name, nn.Parameter(part.detach(), requires_grad=False))
        self._build = build

    def put_together(self) -> Tensor:
        """The weight, around the parts as they are now."""
        return self._build({name: self._parameters[name] for name in self._parameters})  # type: ignore[misc]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves the parts; a cast would change what their numbers mean."""

        def move(part: Tensor) -> Tensor:
            return part.to(fn(part.new_empty(0)).device)

        return super()._apply(move, recurse)  # type: ignore[no-any-return, no-untyped-call]


def take_apart_quantized(module: nn.Module, current: Context) -> None:
    """Has the modules of a model keep the parts of their quantized weights."""
    known: dict[int, _PartsOfWeight] = {}
    for path, inner in list(module.named_modules()):
        for name, weight in list(inner._parameters.items()):
            where = f"{path}.{name}" if path else name
            if weight is None or (weight.requires_grad and current.mesh.world_size == 1):
                continue  # one rank trains it as PyTorch does
            taken = _taken_apart(weight, where)
            if taken is None:
                continue
            _refuse_unfit(weight, where, current)
            parts = known.setdefault(id(weight), _PartsOfWeight(*taken))  # a tie has one
            del inner._parameters[name]
            inner.add_module(f"{name}_parts", parts)
            kind: Any = type(inner)
            inner.__class__ = _with_property(kind, name)
            vars(inner).pop("quant_state", None)  # of bitsandbytes: it would keep what other ranks hold


def shapes_of_quantized(module: nn.Module) -> frozenset[tuple[int, ...]]:
    """The shapes, also transposed, of what layers with quantized weights multiply by."""
    shapes = [each.shape for each in module.modules() if isinstance(each, _PartsOfWeight)]
    return frozenset((*shapes, *(shape[::-1] for shape in shapes)))


def is_quantized(module: nn.Module) -> bool:
    """Whether a model keeps the parts of quantized weights."""
    return any(map(_has_parts, module.modules()))


def with_parts(module: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state in which whole quantized weights, as the model had them before it was wrapped, are parts."""
    paths = [path for path, each in module.named_modules(remove_duplicate=False) if _has_parts(each)]
    if not paths:
        return state
    found: Any = copy.copy(state)
    for path in paths:
        where = path.removesuffix("_parts")
        if where not in found:
            continue
        weight = found.pop(where)
        taken = None if type(weight).__name__ == "Params4bit" else _taken_apart(weight, where)
        if taken is None:
            raise UsageError(
                f"the model keeps the parts of {where}, which is quantized, and the state has it as "
                f"{type(weight).__name__}. Load the state before the model is wrapped."
            )
        found.update({f"{path}.{name}": part for name, part in taken[0].items()})
    return found  # type: ignore[no-any-return]


def _has_parts(module: nn.Module) -> bool:
    return isinstance(module, _PartsOfWeight)


@cache
def _with_property(kind: type[nn.Module], name: str) -> type[nn.Module]:
    """The class of a module that keeps the parts of a weight."""
    found: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        name: property(lambda module: module._modules[f"{name}_parts"].put_together()),
        "_save_to_state_dict": nn.Module._save_to_state_dict,
        "_load_from_state_dict": nn.Module._load_from_state_dict,
    }
    return type(kind.__name__, (kind,), found)


def _taken_apart(weight: nn.Parameter, where: str) -> _Taken | None:
    """The parts of a weight, what builds it from them, its shape; None for a weight of another kind."""
    kind = type(weight)
    if kind.__name__ == "Int8Params":
        raise UsageError(
            f"{where} is quantized by LLM.int8() of bitsandbytes, whose layers keep copies of weights. "
            "Quantize it in 4 bits, or in 8 by torchao: quantize_(model, Int8WeightOnlyConfig())."
        )
    if kind.__name__ == "Params4bit":
        return _of_bitsandbytes(weight, where)
    if kind.__module__.startswith(("torch.", "shardwright.")) or not is_traceable_wrapper_subclass(weight):
        return None
    names, meta = weight.__tensor_flatten__()
    build = partial(_unflattened, kind, meta, weight.shape, weight.stride())
    return {name: getattr(weight, name) for name in names}, build, tuple(weight.shape)


def _unflattened(kind: Any, meta: Any, shape: Any, stride: Any, parts: _Parts) -> Tensor:
    weight: Tensor = kind.__tensor_unflatten__(dict(parts), meta, shape, stride)
    return weight


def _of_bitsandbytes(weight: Any, where: str) -> _Taken:
    state = weight.quant_state
    if state is None:
        raise UsageError(
            f"{where} is quantized by bitsandbytes when it is moved to a device, and has not been. Move the "
            "model before it is wrapped: model.to(sw.device())."
        )
    parts = {"data": weight.data.as_subclass(Tensor), "absmax": state.absmax, "code": state.code}
    if state.nested:
        parts |= {"offset": state.offset, "absmax2": state.state2.absmax, "code2": state.state2.code}
    bare = _state_around(state, dict.fromkeys(parts))
    return parts, partial(_with_state, bare), tuple(state.shape)


def _with_state(bare: Any, parts: _Parts) -> Tensor:
    """The numbers of a 4-bit weight, with the state by which its layer reads them."""
    weight: Any = parts["data"].detach()
    weight.quant_state = _state_around(bare, parts)
    return weight  # type: ignore[no-any-return]


def _state_around(state: Any, parts: Mapping[str, Any]) -> Any:
    made = copy.copy(state)
    made.absmax, made.code = parts["absmax"], parts["code"]
    if made.nested:
        made.offset, made.state2 = parts["offset"], copy.copy(state.state2)
        made.state2.absmax, made.state2.code = parts["absmax2"], parts["code2"]
    return made


def _refuse_unfit(weight: Tensor, where: str, current: Context) -> None:
    what = f"{where} is quantized ({type(weight).__name__})"
    wanted = low_precision(current.config)
    if weight.requires_grad:
        raise UsageError(f"{what}, and trained. Freeze it with requires_grad_(False), and train adapters.")
    if current.mesh.share > 1:
        raise UsageError(
            f"{what}, and {current.mesh.share} ranks would share it (tensor_parallel_degree or its like), "
            "each with a part of the numbers that have one scale. Use pipeline_parallel_degree or "
            "sharded_data_parallel_degree; or a base model that is not quantized."
        )
    if wanted is not None and weight.is_floating_point() and weight.dtype is not wanted:
        raise UsageError(
            f"{what} from {weight.dtype}, and its results have that type, but the settings ask for {wanted}. "
            f"Cast the model before it is quantized: model.to({wanted})."
        )
