"""Allocates and initialises a model that was built on the meta device.

::

    with torch.device("meta"):              shapes, no memory
        model = Net()
    model = sw.DistributedModel(model)      refuses modules for which nobody knows first values
    train_step(model, batch)                plan ─► the units of this rank ─► memory ─► first values

Every module is initialised with a generator seeded from the run's seed and the module's name, and draws for
what other ranks hold of it, too. So the values depend on neither the plan nor the number of ranks, and all
holders of a parameter (replicas, ties) compute the same ones.

Modules get memory one after the other, so that a rank that keeps a part of each parameter never has more than
one module whole.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.comm.joining.process_group import tell_from
from shardwright.errors import UsageError
from shardwright.torch.parameters.delayed_initialization import recorded_values
from shardwright.torch.parameters.first_values import (
    Elsewhere,
    Initialise,
    Unknown,
    children_first,
    initialise,
    initialise_container,
    unknown_values,
)
from shardwright.torch.parameters.parameter_kinds import gradient_dtype, set_gradient_dtype
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.tensor_parallel.divided_tensor import local_of

Then = Mapping[int, Callable[[Tensor], None]]

_NOTHING: Then = {}

_SHOWN = 3


class Materialiser:
    """Turns tensors of a model from the meta device into real ones, where they are needed.

    Tensors keep their identity: optimizers, ties and variables of the script refer to the real ones then.
    """

    def __init__(self, model: nn.Module, *, device: torch.device, initialize: Initialise | None = None):
        self._model = model
        self._device = device
        self._initialize = initialize
        self._given = {id(t) for t in _tensors(model) if not t.is_meta}
        self._first_owner = _first_owners(model)
        self.seed = torch.initial_seed()

    def agree_on_seed(self) -> None:
        """Takes the first rank's seed; collective over all ranks."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.seed = tell_from(0, self.seed)

    @property
    def waits(self) -> bool:
        """Whether some parameter or buffer has no memory yet."""
        return any(tensor.is_meta for tensor in _tensors(self._model))

    def check(self) -> None:
        """Refuses modules for which nobody knows first values, before memory is taken."""
        if self._initialize is None:
            _refuse(unknown_values(self._model))

    def everything(self, *, but: Collection[str] = ()) -> None:
        """Gives memory and values to the whole model."""
        waiting = {id(p) for name, p in self._model.named_parameters() if name in but}
        wanted = {id(tensor) for tensor in _tensors(self._model)}
        self._materialise(wanted - waiting, whole_modules=True)

    def named(self, names: Collection[str], unit_map: UnitMap, *, then: Then = _NOTHING) -> None:
        """Gives memory and values to parameters and buffers."""
        wanted = set(names)
        self._materialise(
            {i for i, name in unit_map.parameters.items() if name in wanted}, whole_modules=True, then=then
        )

    def buffers_outside(self, unit_map: UnitMap) -> None:
        """Gives values to buffers outside of units: every rank runs operations on them, also in a trace."""
        inside = {id(sub) for unit in unit_map.modules.values() for sub in unit.modules()}
        wanted = {
            id(buffer)
            for module in self._model.modules()
            if id(module) not in inside
            for buffer in module._buffers.values()
            if buffer is not None
        }
        self._materialise(wanted, whole_modules=False)

    def _materialise(self, wanted: set[int], *, whole_modules: bool, then: Then = _NOTHING) -> None:
        fresh: dict[int, Tensor] = {}
        for tensor in _tensors(self._model):
            if tensor.is_meta and id(tensor) in wanted:
                fresh[id(tensor)] = tensor
        if not fresh:
            return
        for key, tensor in list(fresh.items()):
            values = recorded_values(tensor)
            if values is not None:
                _become(tensor, _own_memory(values, tensor).to(self._device))
                del fresh[key], values
                if key in then:
                    then[key](tensor)
        with torch.no_grad():
            for name, module, above in children_first(self._model):
                if any(id(tensor) in fresh for tensor in _own(module).values()):
                    filled = [t for t in _own(module).values() if self._is_filled_by(name, t, fresh)]
                    for tensor in filled:
                        _take_memory(tensor, self._device)
                    with self._seeded(name), self._only(module, name, fresh):
                        initialise(module, above, self._initialize)
                    for tensor in filled:
                        if id(tensor) in then:
                            then[id(tensor)](tensor)
                elif whole_modules and self._is_new(module, fresh):
                    with self._seeded(name), self._only(module, name, fresh):
                        if _own(module):  # on another rank: it may fill what is inside with them
                            initialise(module, above, self._initialize)
                        else:
                            initialise_container(module, above)
        _refuse(self._without_values(fresh))

    def _is_filled_by(self, name: str, tensor: Tensor, fresh: Mapping[int, Tensor]) -> bool:
        """Whether a module gives a tensor its values: a tie has those of its first owner."""
        return id(tensor) in fresh and self._first_owner[id(tensor)] == name

    def _is_new(self, module: nn.Module, fresh: Mapping[int, Tensor]) -> bool:
        """Whether all that is inside came without values, and some of it gets them now."""
        inside = {id(tensor) for tensor in _tensors(module)}
        return not inside.isdisjoint(fresh) and inside.isdisjoint(self._given)

    @contextmanager
    def _seeded(self, name: str) -> Iterator[None]:
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            yield

    @contextmanager
    def _only(self, module: nn.Module, name: str, fresh: Mapping[int, Tensor]) -> Iterator[None]:
        """Lets a module write to what gets its values from it, and to nothing else that it holds.

        A tie has the values of its first owner, as where one module takes over the parameter of another. What
        other ranks hold has stand-ins, also in the modules inside.
        """
        own = _own(module)
        absent = [
            (inner, key, tensor)
            for inner in module.modules()
            for key, tensor in _own(inner).items()
            if (tensor.is_meta if inner is not module else not self._is_filled_by(name, tensor, fresh))
        ]
        elsewhere = Elsewhere(self._device)
        stand_ins: dict[tuple[int, bool], Tensor] = {}  # one for all names of a tie
        for inner, key, tensor in absent:
            which = id(tensor), inner is module
            if which not in stand_ins:
                stand_ins[which] = elsewhere.stand_in(tensor)
            _registry(inner, key)[key] = stand_ins[which]
        try:
            yield
        finally:
            for inner, key, tensor in absent:
                _registry(inner, key)[key] = tensor
            for key, tensor in own.items():
                registry = _registry(module, key)
                made = registry.get(key)
                expected = self._is_filled_by(name, tensor, fresh)
                if expected and made is not None and made is not tensor and not made.is_meta:
                    tensor.copy_(made)  # it made a new tensor instead of filling the old one
                registry[key] = tensor

    def _without_values(self, fresh: Mapping[int, Tensor]) -> list[Unknown]:
        found = []
        for name, module in self._model.named_modules():
            missing = [
                key
                for key, tensor in _own(module).items()
                if self._is_filled_by(name, tensor, fresh) and _is_untouched(local_of(tensor))
            ]
            if missing:
                found.append(Unknown(name, type(module).__name__, tuple(missing)))
        return found


def _refuse(unknown: list[Unknown]) -> None:
    if not unknown:
        return
    shown = "; ".join(str(one) for one in unknown[:_SHOWN])
    more = f"; and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
    raise UsageError(
        f"the model was built on the meta device, but nothing gives first values to {shown}{more}. Give such "
        "a class a method reset_parameters() that fills its parameters and buffers, or pass a function that "
        "does: DistributedModel(model, initialize=function); it is called with each module that needs values."
    )


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _own(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that are registered here, children's not counted."""
    found = {**module._parameters, **module._buffers}
    return {key: tensor for key, tensor in found.items() if tensor is not None}


def _registry(module: nn.Module, key: str) -> dict[str, Tensor | None]:
    return module._parameters if key in module._parameters else module._buffers  # type: ignore[return-value]


def _first_owners(model: nn.Module) -> dict[int, str]:
    owners: dict[int, str] = {}
    for name, module in model.named_modules():
        for tensor in _own(module).values():
            owners.setdefault(id(tensor), name)
    return owners


def _take_memory(tensor: Tensor, device: torch.device) -> None:
    """Makes a meta tensor a real one, the same object, full of a number that no initialisation leaves."""
    real = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    mark = _mark_of(tensor.dtype)
    if mark is not None:
        real.fill_(mark)
    _become(tensor, real)


def _own_memory(values: Tensor, like: Tensor) -> Tensor:
    """Values in memory that is theirs alone, laid out like a tensor: they are copied only if they are not."""
    alone = values.untyped_storage().nbytes() == values.nbytes
    if alone and values.stride() == like.stride():
        return values
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(values)


def _become(tensor: Tensor, real: Tensor) -> None:
    """Makes a meta tensor a real one, the same object."""
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, requires_grad=tensor.requires_grad)
        set_gradient_dtype(real, gradient_dtype(tensor))
    swap: Callable[[Tensor, Tensor], None] = torch.utils.swap_tensors
    swap(tensor, real)


def _mark_of(dtype: torch.dtype) -> float | int | None:
    """The number that stands for "no value yet"; None for types in which every number may be a value."""
    if dtype.itemsize < 2:
        return None
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return torch.iinfo(dtype).min


def _is_untouched(tensor: Tensor) -> bool:
    """Whether some entry has no value yet."""
    if tensor.numel() == 0:
        return False
    mark = _mark_of(tensor.dtype)
    if mark is None:
        return tensor._version == 0
    plain = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    # Unlike isnan, the largest entry needs no memory; NaN is larger than anything.
    return bool(plain.max().isnan()) if plain.is_floating_point() else int(plain.min()) == mark
