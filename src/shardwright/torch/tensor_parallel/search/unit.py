"""The units whose placements are sought, what their tensors are made of, and placements in common.

All units of a kind (the same modules, shapes and arguments) get the same placements, so one of them is
recorded. The rest of the model (embedding, head, loss) is a unit of its own, with stand-ins for the others::

    model          embed ─ layer 0 ─ layer 1 ─ ... ─ layer 99 ─ norm ─ head ─ loss
    rest           embed ─ [    ]  ─ [    ]  ─ ... ─ [      ] ─ norm ─ head ─ loss
    kind           layer 0, with the arguments that the rest gave it
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwright.placement import Cut, Placement
from shardwright.torch._private.tensors import FakeTensor, new_fake_mode, unset_fake_temporarily
from shardwright.torch.pytorch.tensors import copy_of_object
from shardwright.torch.pytorch.tree import flatten, leaves, map_tree
from shardwright.torch.tensor_parallel.deciding import GroupedProductsOfAllTypes
from shardwright.torch.tensor_parallel.spec import is_dense

_SPREAD = 0.02
"""Of random parameters and activations: small enough for deep stacks of products."""


class Material:
    """Makes tensors like others.

    Attributes:
        is_random: they have random numbers, or those of the others where these have data.
    """

    def __init__(self, *, is_random: bool = False):
        self.is_random = is_random
        self._fake = new_fake_mode()
        self._generator = torch.Generator().manual_seed(0)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Operations inside make tensors of this material, and leave the generators as they were."""
        if self.is_random:
            with unset_fake_temporarily(), torch.random.fork_rng(devices=_gpus()):
                torch.manual_seed(0)
                yield
        else:
            with self._fake, GroupedProductsOfAllTypes():  # type: ignore[no-untyped-call]
                yield

    def like(self, item: Any) -> Any:
        """A leaf, or a parameter, like a tensor; of an object that a call may fill (a cache), such a copy."""
        if not isinstance(item, Tensor):
            return copy_of_object(item, self.like)
        tensor = item
        if self.is_random:
            with unset_fake_temporarily():
                made = self._with_data(tensor)
        else:
            with self._fake:
                device = _device(tensor)
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)

    def _with_data(self, tensor: Tensor) -> Tensor:
        if not (tensor.is_meta or isinstance(tensor, FakeTensor)):
            return tensor.detach().clone()
        device = _device(tensor)
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        numbers = torch.randn(tensor.shape, generator=self._generator) * _SPREAD
        if not is_dense(tensor.shape, tensor.stride()):
            return numbers.to(device, tensor.dtype)
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return made.copy_(numbers)


def _gpus() -> list[int]:
    """The GPUs whose generators are to be kept: seeding seeds those of all."""
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [*range(torch.cuda.device_count())] if in_use else []


def _device(tensor: Tensor) -> torch.device:
    """A tensor on the meta device gets its memory in the first step: it is on the CPU, as its inputs are."""
    return torch.device("cpu") if tensor.is_meta else tensor.device


Boundary = Callable[[Sequence[Tensor]], None]
"""Told of tensors that must be whole, because they leave a unit or enter one."""

Results = Callable[[Any], Sequence[Tensor]]
"""Which tensors of what a module returned are used further."""


Run = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Calls a copy of a module with arguments by position and by name; gives all that leaves it."""


def _plain_run(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module(*args, **kwargs)


class Following(Protocol):
    """Operations behind a unit that take its results as ranks have them: `torch/tracing/divided_tail.py`.

    Attributes:
        inside: the tensors that stay so, once they have run.
    """

    inside: list[Tensor]

    def __call__(self, result: Any) -> Sequence[Tensor]:
        """Runs them on what the unit returned; gives what is used further."""


def tensors_in(results: Any) -> list[Tensor]:
    """All tensors of what a module returned."""
    return [each for each in leaves(results) if isinstance(each, Tensor)]


@dataclass(slots=True)
class Unit:
    """A module, and a call of it.

    Attributes:
        module: the parameters may have data or none; they are not changed.
        args, kwargs: of the call; the tensors may have data or none.
        following: makes operations behind it that belong to it, of tensors of a material; tensors that they
            give are used further. None: there are none, and all tensors that the module returns are.
        shared: places, among the leaves of the call, of tensors whose gradients are placed once for several
            units, and not by this one.
        kept_whole: stand-ins for modules within it, by name: units of their own, or modules of which no step
            can be recorded; the name is empty where that is the unit itself.
        cost_classes: of the call in a trace, and of the operations that follow it; none where it was not
            traced.
    """

    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    following: Callable[[Material], Following] | None = None
    shared: frozenset[int] = frozenset()
    kept_whole: Mapping[str, "StandIn"] = field(default_factory=dict)
    run: Run = _plain_run
    cost_classes: tuple[str, ...] = ()

    def call_of(self, module: nn.Module) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.run(module, args, kwargs)


class StandIn(nn.Module):
    """In the place of a unit: gives tensors like those that the unit gave, and gradients like its inputs."""

    def __init__(self, unit: nn.Module, outputs: Any, *, reason: str = ""):
        """Args: reason: why no step of it can be recorded."""
        super().__init__()
        self.__dict__["unit"] = unit
        self.outputs = outputs
        self.reason = reason
        self.boundary: Boundary = lambda tensors: None
        self.has_parameters = any(each.requires_grad for each in unit.parameters())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The recorded results, without data."""
        inputs = tensors_in((args, kwargs))
        flat, structure = flatten(self.outputs)
        places = [place for place, each in enumerate(flat) if isinstance(each, Tensor)]
        anchor = torch.empty(0, requires_grad=self.has_parameters)
        made = _Passage.apply(  # type: ignore[no-untyped-call]
            self.boundary, [flat[place] for place in places], anchor, *inputs
        )
        for place, tensor in zip(places, made, strict=True):
            flat[place] = tensor
        return structure.rebuild(flat)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["unit"], name)


class _Passage(torch.autograd.Function):
    """Whole tensors in, whole tensors out; gradients likewise."""

    @staticmethod
    def forward(ctx: Any, boundary: Boundary, outputs: list[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        boundary(inputs)
        ctx.boundary = boundary
        ctx.inputs = [(each.shape, each.dtype, each.device, each.requires_grad) for each in inputs]
        made = tuple(torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in outputs)
        ctx.mark_non_differentiable(*(each for each in made if not each.is_floating_point()))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.boundary([each for each in gradients if each is not None])
        found = [
            torch.empty(shape, dtype=dtype, device=device) if wanted else None
            for shape, dtype, device, wanted in ctx.inputs
        ]
        return (None, None, *found)


def copy_of(unit: Unit, material: Material, boundary: Boundary) -> nn.Module:
    """A copy of the unit's module whose parameters and buffers are of a material. Tied ones stay tied."""
    memo: dict[int, Any] = {}
    for stand_in in unit.kept_whole.values():
        own = StandIn(stand_in.unit, stand_in.outputs)
        own.boundary = boundary
        memo[id(stand_in.unit)] = own
    for tensor in [*unit.module.parameters(), *unit.module.buffers()]:
        memo[id(tensor)] = material.like(tensor)
    return copy.deepcopy(unit.module, memo)


_MOST_RANDOM_BYTES = 2**30


def is_small(module: nn.Module) -> bool:
    """Whether there is memory for a copy of a module with data."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum(each.numel() * each.element_size() for each in tensors) <= _MOST_RANDOM_BYTES


def results_of(module: nn.Module, args: Any, kwargs: Any, *, run: Run = _plain_run) -> Any:
    """What a module gives, on random numbers where it fails without data; as tensors without data."""
    without_data = Material()
    try:
        return _results(module, args, kwargs, without_data, run)
    except Exception:
        if not is_small(module):
            raise
    found = _results(module, args, kwargs, Material(is_random=True), run)
    return map_tree(without_data.like, found)


def _results(module: nn.Module, args: Any, kwargs: Any, material: Material, run: Run) -> Any:
    own_args, own_kwargs = map_tree(material.like, (tuple(args), dict(kwargs)))
    with material.in_use(), torch.no_grad():
        return run(copy_of(Unit(module), material, lambda tensors: None), own_args, own_kwargs)


def kind_of(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """What units of a kind have in common: modules, shapes of parameters, shapes of tensors in the call."""
    modules = tuple((name, type(each)) for name, each in module.named_modules())
    tensors = tuple(
        (name, tuple(each.shape), each.dtype, each.requires_grad)
        for name, each in [*module.named_parameters(), *module.named_buffers()]
    )
    call = tuple(
        (tuple(each.shape), each.dtype, each.requires_grad) if isinstance(each, Tensor) else type(each)
        for each in leaves((args, dict(kwargs)))
    )
    return modules, tensors, call, len(args), tuple(kwargs)


@dataclass(slots=True)
class Role:
    """Parameters with one placement.

    Attributes:
        itemsize: bytes of an element.
        members: kinds of units, by index, and the names within a unit.
        full_names: of all parameters, in the model.
        pinned: the one that they have in any case; None where it is searched.
    """

    shape: tuple[int, ...]
    num_elements: int = 0
    itemsize: int = 4
    members: list[tuple[int, str]] = field(default_factory=list)
    full_names: list[str] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    pinned: Placement | None = None

    def local_elements(self, cut: Cut | None, num_ranks: int) -> float:
        """Elements of the rank with the largest part."""
        if cut is None:
            return self.num_elements
        return self.num_elements * max(cut.length(rank) for rank in range(num_ranks)) / cut.size


def roles_of(
    kinds: Sequence[Sequence[tuple[str, Unit]]], pinned: Mapping[str, Placement] | None = None
) -> list[Role]:
    pinned = pinned or {}
    role_of: dict[tuple[object, ...], Role] = {}
    role_of_tensor: dict[int, Role] = {}
    for index, units in enumerate(kinds):
        for unit_name, unit in units:
            for name, parameter in own_parameters(unit):
                shape = tuple(parameter.shape)
                # Layers of a list, or experts, are alike.
                full_name = f"{unit_name}.{name}" if unit_name else name
                pin = pinned.get(full_name)
                key = index, re.sub(r"\d+", "*", name), shape, pin
                role = role_of_tensor.get(id(parameter)) or role_of.get(key)
                if role is None:
                    role = Role(shape, itemsize=parameter.element_size(), pinned=pin)
                role_of.setdefault(key, role)
                if id(parameter) not in role_of_tensor:
                    role.num_elements += parameter.numel()
                    role.full_names.append(full_name)
                role_of_tensor[id(parameter)] = role
                if (index, name) not in role.members:
                    role.members.append((index, name))
    return list({id(role): role for role in role_of.values()}.values())


def pins_within(
    unit_name: str, unit: Unit, pinned: Mapping[str, Placement]
) -> tuple[tuple[str, Placement], ...]:
    """The pinned parameters of a unit, by their names within it: units with others are of another kind."""
    prefix = f"{unit_name}." if unit_name else ""
    own = ((name, pinned.get(prefix + name)) for name, _ in own_parameters(unit))
    return tuple((name, pin) for name, pin in own if pin is not None)


def own_parameters(unit: Unit) -> list[tuple[str, nn.Parameter]]:
    """Parameters of a unit by name, without those of units within it."""
    inner = tuple(f"{name}." for name in unit.kept_whole)
    return [
        (name, each)
        for name, each in unit.module.named_parameters()
        if not inner or not name.startswith(inner)
    ]
