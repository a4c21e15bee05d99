"""Takes a model apart into units and the rest, by one call without data."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from shardwright.torch.pytorch.tree import map_tree
from shardwright.torch.tensor_parallel.search.unit import Material, StandIn, Unit, kind_of, results_of


class Capture(nn.Module):
    """In the place of a unit during the first call of the model: notes the call, and runs one of a kind."""

    def __init__(self, unit: nn.Module, name: str, calls: dict[str, Any], outputs: dict[Any, Any]):
        super().__init__()
        self.__dict__["unit"] = unit
        self._name, self._calls, self._outputs = name, calls, outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kind = kind_of(self.unit, args, kwargs)
        if kind not in self._outputs:
            self._outputs[kind] = results_of(self.unit, args, kwargs)
        assert self._name not in self._calls
        self._calls[self._name] = (args, kwargs, self._outputs[kind])
        # Gradients flow on, so that units after this one know which of their inputs get some.
        return StandIn(self.unit, self._outputs[kind])(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["unit"], name)


def loss_alone(module: nn.Module, args: Any, kwargs: Any) -> list[Tensor]:
    """The run of a unit of which the loss alone is used further."""
    return [module(*args, **kwargs).loss]


def units_of(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    units: Sequence[str],
    run: Callable[..., Any] | None = None,
) -> dict[str, Unit]:
    material = Material()
    calls: dict[str, Any] = {}
    outputs: dict[Any, Any] = {}
    modules = {name: model.get_submodule(name) for name in units}
    memo: dict[int, Any] = {id(each): Capture(each, name, calls, outputs) for name, each in modules.items()}
    inner = {id(each) for module in modules.values() for each in module.parameters()}
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
    rest = Unit(
        model,
        tuple(args),
        dict(kwargs or {}),
        kept_whole={name: StandIn(each, calls[name][2]) for name, each in modules.items()},
    )
    return {
        "": rest if run is None else replace(rest, run=run),
        **{name: Unit(each, calls[name][0], calls[name][1]) for name, each in modules.items()},
    }
