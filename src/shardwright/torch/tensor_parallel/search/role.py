"""Parameters that get one placement together: those of all units of a kind, of a role, and tied ones."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from shardwright.placement import Cut, Placement
from shardwright.torch.tensor_parallel.search.unit import Unit

__all__ = ["Role", "pins_within", "roles_of"]


@dataclass(slots=True)
class Role:
    """Parameters with one placement.

    Attributes:
        num_elements: of all of them, tied ones counted once.
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
    """The roles of all parameters."""
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
    inner = tuple(f"{name}." for name in unit.stand_ins)
    return [
        (name, each)
        for name, each in unit.module.named_parameters()
        if not inner or not name.startswith(inner)
    ]
