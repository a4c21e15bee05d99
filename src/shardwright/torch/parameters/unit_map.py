"""Looks up a model's units and parameters by identity."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwright.errors import StalePlanError, TraceError
from shardwright.model_graph import ParameterSpec
from shardwright.plan import REMEDY
from shardwright.torch.interception.deferred import spec_of

__all__ = ["UnitMap", "refuse_unknown_units"]


@dataclass(frozen=True, slots=True)
class UnitMap:
    """Units and parameters of a model by identity, with their names.

    Attributes:
        units: id of the module -> name of the unit.
        modules: name of the unit -> module.
        parameters: id of a parameter or buffer -> its first name.
        specs: first name -> what it is.
    """

    model: nn.Module
    units: dict[int, str]
    modules: dict[str, nn.Module]
    parameters: dict[int, str]
    specs: dict[str, ParameterSpec]

    @classmethod
    def of(cls, model: nn.Module, unit_names: Sequence[str]) -> "UnitMap":
        """Looks units up by name."""
        return cls._with(model, {name: model.get_submodule(name) for name in unit_names})

    def with_new_tensors(self) -> "UnitMap":
        """The same units, with the parameters and buffers that the model has now."""
        return self._with(self.model, self.modules)

    @classmethod
    def _with(cls, model: nn.Module, modules: dict[str, nn.Module]) -> "UnitMap":
        parameters: dict[int, str] = {}
        tensors: dict[str, tuple[Tensor, bool]] = {}
        aliases: dict[str, list[str]] = {}
        for is_buffer, source in (
            (False, model.named_parameters(remove_duplicate=False)),
            (True, model.named_buffers(remove_duplicate=False)),
        ):
            for name, tensor in source:
                if tensor.layout is not torch.strided:
                    raise TraceError(
                        f"{name} is a sparse tensor ({tensor.layout}), which a model over several stages "
                        "cannot hold. Register its indices and its values as two buffers, and make the "
                        "sparse tensor of them in the forward of the module that uses it."
                    )
                first = parameters.setdefault(id(tensor), name)
                if first == name:
                    tensors[name] = (tensor, is_buffer)
                else:
                    aliases.setdefault(first, []).append(name)
        specs = {
            name: ParameterSpec(
                name=name, spec=spec_of(tensor), aliases=tuple(aliases.get(name, ())), is_buffer=is_buffer
            )
            for name, (tensor, is_buffer) in tensors.items()
        }
        return cls(
            model=model,
            units={id(module): name for name, module in modules.items()},
            modules=modules,
            parameters=parameters,
            specs=specs,
        )


def refuse_unknown_units(model: nn.Module, names: Sequence[str]) -> None:
    """Refuses a plan with units that are no modules of this model; `Plan.check` compares the others."""
    known = dict(model.named_modules(remove_duplicate=False))
    missing = [name for name in names if name not in known]
    if missing:
        raise StalePlanError(
            f"the plan was made for another model: {len(missing)} of its {len(names)} units are no modules "
            f"of this one, for example {missing[0]}. {REMEDY}"
        )
