"""Chooses the units of a model: the modules that are placed whole.

One forward on fake tensors shows which modules are called, how often, and each one's share of the work. Then
a walk descends the tree from the root. A module becomes a unit when it is a repeated block, when splitting it
would gain nothing, or when no called module inside it has parameters; otherwise the walk goes on with its
children. Modules without parameters (activations, dropout, containers) are glue between units.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

__all__ = ["ModuleCost", "choose_units"]

# A module with less than this share of a stage's work is not split further: its pieces could not balance
# anything.
_SMALL_SHARE_OF_STAGE = 0.125
# A repeated block is split only where it alone is this much of a stage. So is any block without others inside
# where ranks share its parameters: what flows between units is whole, and what flows inside is in parts.
_LARGE_SHARE_OF_STAGE = 0.67
# Floating-point operations of a block that take a device as long as the host needs for its pieces: one with
# less is split only where there would be too few blocks for the stages.
_LITTLE_WORK = {"cpu": 5e7}
_LITTLE_WORK_OF_GPU = 5e10


@dataclass(slots=True)
class ModuleCost:
    """The work of one module in one forward.

    Attributes:
        calls: how often it was called through ``module(...)``.
        flops: floating-point operations, those of its children included.
        recomputed: the model recomputes its activations (``torch.utils.checkpoint``).
        whole: it cannot be split: see `shardwright.torch.units.entanglement`.
        chooses_at_random: its own code draws random numbers and looks at values: as if it skipped itself.
    """

    calls: int = 0
    flops: int = 0
    recomputed: bool = False
    whole: bool = False
    chooses_at_random: bool = False


@dataclass(slots=True)
class _Walk:
    costs: dict[str, ModuleCost]
    called: frozenset[int]
    total: float
    num_stages: int
    forced: frozenset[int]
    preferred: frozenset[int]
    divides: bool
    little_work: float
    units: list[str] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)

    def visit(self, module: nn.Module, name: str, *, repeated: bool) -> None:
        """Makes the module a unit, or continues with its children."""
        if id(module) in self.seen:
            return
        self.seen.add(id(module))
        if self._is_unit(module, name, repeated=repeated) and name:
            self.units.append(name)
            self.seen.update(id(sub) for sub in module.modules())
            return
        for child_name, child, is_repeated in _children(module):
            self.visit(child, f"{name}.{child_name}" if name else child_name, repeated=is_repeated)

    def _is_unit(self, module: nn.Module, name: str, *, repeated: bool) -> bool:
        cost = self.costs.get(name, ModuleCost())
        if cost.calls > 0 and id(module) in self.forced:
            return True
        if cost.calls == 0 or not _has_parameters(module):
            return False
        share_of_stage = self.share(name) * self.num_stages
        if cost.whole or (id(module) in self.preferred and share_of_stage <= 1.0):
            return True
        if not self._calls_inside(module):
            return True
        if repeated:
            # Those that have skipped themselves did no work, so that others have too large a share.
            largest = 1.0 if cost.flops <= self.little_work else _LARGE_SHARE_OF_STAGE
            return cost.chooses_at_random or share_of_stage <= largest
        in_one_piece = self.divides and not _has_repeated_blocks(module)
        return share_of_stage <= (_LARGE_SHARE_OF_STAGE if in_one_piece else _SMALL_SHARE_OF_STAGE)

    def _calls_inside(self, module: nn.Module) -> bool:
        """Whether modules inside with parameters are called, not only read, as in `nn.MultiheadAttention`."""
        return any(
            sub is not module and id(sub) in self.called and _has_parameters(sub) for sub in module.modules()
        )

    def share(self, name: str) -> float:
        """Share of the model's work."""
        return self.costs[name].flops / self.total if self.total else 0.0


def choose_units(
    model: nn.Module,
    costs: dict[str, ModuleCost],
    *,
    num_stages: int,
    forced: frozenset[int] = frozenset(),
    preferred: frozenset[int] = frozenset(),
    divides: bool = False,
    device: str = "cpu",
) -> list[str]:
    """The names of the units, in order of registration."""
    # A step may call parts of the model in the place of the model (a GAN's generator, its discriminator).
    total = float(sum(cost.flops for name, cost in costs.items() if not _is_called_inside(name, costs)))
    called = frozenset(id(model.get_submodule(name)) for name, cost in costs.items() if cost.calls)
    walk = _Walk(
        costs,
        called,
        total,
        num_stages=num_stages,
        forced=forced,
        preferred=preferred,
        divides=divides,
        little_work=_LITTLE_WORK.get(device, _LITTLE_WORK_OF_GPU),
    )
    walk.visit(model, "", repeated=False)
    return walk.units


def _is_called_inside(name: str, costs: Mapping[str, ModuleCost]) -> bool:
    """Whether a module around it is called."""
    while name:
        name = name.rpartition(".")[0]
        if name in costs:
            return True
    return False


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Children by name, and whether each is one of several siblings of one class that have children."""
    counts: dict[type, int] = {}
    for child in module.children():
        if next(child.children(), None) is not None:
            counts[type(child)] = counts.get(type(child), 0) + 1
    for name, child in module.named_children():
        yield name, child, counts.get(type(child), 0) >= 2 and not isinstance(child, _CONTAINERS)


def _has_repeated_blocks(module: nn.Module) -> bool:
    return any(repeated for sub in module.modules() for _, _, repeated in _children(sub))


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
