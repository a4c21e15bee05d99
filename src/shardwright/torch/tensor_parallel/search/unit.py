"""The units whose placements are sought, and how a large model comes apart into them.

All units of a kind (the same modules, shapes and arguments) get the same placements, so one of them is
recorded. The rest of the model (embedding, head, loss) is a unit of its own, with stand-ins for the others::

    model          embed ─ layer 0 ─ layer 1 ─ ... ─ layer 99 ─ norm ─ head ─ loss
    rest           embed ─ [    ]  ─ [    ]  ─ ... ─ [      ] ─ norm ─ head ─ loss
    kind           layer 0, with the arguments that the rest gave it
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.torch.pytorch.tree import flatten, leaves, map_tree
from shardwright.torch.tensor_parallel.search.material import Material

__all__ = [
    "Boundary",
    "Following",
    "Results",
    "Run",
    "StandIn",
    "Unit",
    "copy_of",
    "is_small",
    "kind_of",
    "results_of",
    "tensors_in",
    "units_of",
]

Boundary = Callable[[Sequence[Tensor]], None]
"""Told of tensors that must be whole, because they leave a unit or enter one."""

Results = Callable[[Any], Sequence[Tensor]]
"""Which tensors of what a module returned are used further."""


Run = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Calls a copy of a module with arguments by position and by name; gives all that leaves it."""


def _plain_run(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module(*args, **kwargs)


class Following(Protocol):
    """Operations behind a unit that take its results as ranks have them (see `divided_tail.py`).

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
        results: which tensors of what the module returns are used further: they must be whole, and get
            gradients. By default all of them.
        stand_ins: for modules within it that are units of their own.
        following: makes operations behind it that belong to it, of tensors of a material; they take the place
            of `results`. None: there are none.
        shared: places, among the leaves of the call, of tensors whose gradients are placed once for several
            units, and not by this one.
        kept_whole: stand-ins for modules within it of which no step can be recorded, by name; the name is
            empty where it is the unit itself.
        run: calls copies of the module.
        cost_classes: of the call in a trace, and of the operations that follow it; none where it was not
            traced.
    """

    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    results: Results = tensors_in
    stand_ins: Mapping[str, "StandIn"] = field(default_factory=dict)
    following: Callable[[Material], Following] | None = None
    shared: frozenset[int] = frozenset()
    kept_whole: Mapping[str, "StandIn"] = field(default_factory=dict)
    run: Run = _plain_run
    cost_classes: tuple[str, ...] = ()

    def call_of(self, module: nn.Module) -> Callable[..., Any]:
        """The call of a copy of the module."""
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
    for stand_in in [*unit.stand_ins.values(), *unit.kept_whole.values()]:
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
    return map_tree(lambda each: without_data.like(each) if isinstance(each, Tensor) else each, found)


def _results(module: nn.Module, args: Any, kwargs: Any, material: Material, run: Run) -> Any:
    own_args, own_kwargs = map_tree(
        lambda each: material.like(each) if isinstance(each, Tensor) else each, (tuple(args), dict(kwargs))
    )
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


class _Capture(nn.Module):
    """In the place of a unit during the first call of the model: notes the call, and runs one of a kind."""

    def __init__(self, unit: nn.Module, name: str, calls: dict[str, Any], outputs: dict[Any, Any]):
        super().__init__()
        self.__dict__["unit"] = unit
        self._name, self._calls, self._outputs = name, calls, outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kind = kind_of(self.unit, args, kwargs)
        if kind not in self._outputs:
            self._outputs[kind] = results_of(self.unit, args, kwargs)
        if self._name in self._calls:
            raise UsageError(
                f"{self._name} is called twice in a step, so it cannot be a unit of its own. Leave it out."
            )
        self._calls[self._name] = (args, kwargs, self._outputs[kind])
        # Gradients flow on, so that units after this one know which of their inputs get some.
        stand_in = StandIn(self.unit, self._outputs[kind])
        return stand_in(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["unit"], name)


def units_of(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    units: Sequence[str],
    results: Callable[[Any], Sequence[Tensor]] = tensors_in,
) -> dict[str, Unit]:
    """Takes a model apart into units and the rest, by one call without data."""
    material = Material()
    calls: dict[str, Any] = {}
    outputs: dict[Any, Any] = {}
    memo: dict[int, Any] = {
        id(model.get_submodule(name)): _Capture(model.get_submodule(name), name, calls, outputs)
        for name in units
    }
    inner = {id(each) for name in units for each in model.get_submodule(name).parameters()}
    for tensor in [*model.parameters(), *model.buffers()]:
        if id(tensor) not in inner:
            memo[id(tensor)] = material.like(tensor)
    captured = copy.deepcopy(model, memo)
    own_args, own_kwargs = map_tree(
        lambda each: material.like(each) if isinstance(each, Tensor) else each,
        (tuple(args), dict(kwargs or {})),
    )
    with material.in_use():
        captured(*own_args, **own_kwargs)
    if missing := [name for name in units if name not in calls]:
        raise UsageError(f"{missing} are not called in a step of the model. Leave them out of the units.")
    stand_ins = {name: StandIn(model.get_submodule(name), calls[name][2]) for name in units}
    found = {"": Unit(model, tuple(args), dict(kwargs or {}), results, stand_ins)}
    for name in units:
        found[name] = Unit(model.get_submodule(name), calls[name][0], calls[name][1])
    return found
