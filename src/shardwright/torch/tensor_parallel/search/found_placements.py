"""What a search for placements has found, and what it costs a step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardwright.placement import Placement

Goal = Literal["speed", "memory"]

# Holding all parameters is worth so many steps of the time that a step takes with all of them whole. So for
# speed, a plan that halves what a rank holds may take a quarter longer. A price by bytes would leave small
# models whole, whose users asked for a division all the same, and outweigh everything on fast memory.
MEMORY_WEIGHT: dict[Goal, float] = {"speed": 0.5, "memory": 4.0}

# Of Python and of the dispatch, without which a step of a small model would seem to take no time.
OPERATION_S = 20e-6

# Of an operation's seconds, those that do not depend on its size.
KERNEL_S = 4e-6


@dataclass(frozen=True, slots=True)
class PlanPrice:
    """Seconds of a step, of the busiest rank.

    Attributes:
        work_s: of operations, by their local sizes.
        exchange_s: of changes of placement, those within operations and of gradients included.
        memory_s: what the parameters that a rank holds count, against seconds.
    """

    work_s: float = 0.0
    exchange_s: float = 0.0
    memory_s: float = 0.0

    @property
    def total_s(self) -> float:
        """By which plans are compared."""
        return self.work_s + self.exchange_s + self.memory_s

    def __add__(self, other: "PlanPrice") -> "PlanPrice":
        return PlanPrice(
            self.work_s + other.work_s, self.exchange_s + other.exchange_s, self.memory_s + other.memory_s
        )


@dataclass(frozen=True, slots=True)
class WorkShares:
    """Shares of a unit's forward and of its backward that the busiest rank computes."""

    forward: float = 1.0
    backward: float = 1.0


@dataclass(frozen=True, slots=True)
class FoundPlacements:
    """The cheapest plan.

    Attributes:
        placements: of the parameters that are cut, by their names in the model.
        price: of a step, all units together.
        whole_price: the same with all parameters whole but those that are pinned.
        divided: share of the parameters' elements that are cut.
        kind_of: the first unit of the kind of each unit, by name.
        shares: of a kind's work, by the name of its first unit.
        kept_whole: modules of which no step can be recorded, so that all ranks have their parameters, by
            name, and the reasons.
    """

    placements: Mapping[str, Placement]
    price: PlanPrice
    whole_price: PlanPrice
    divided: float
    kind_of: Mapping[str, str]
    shares: Mapping[str, WorkShares]
    kept_whole: Mapping[str, str]

    def of_unit(self, name: str) -> dict[str, Placement]:
        """Placements of the parameters of one unit, by their names within it."""
        prefix = f"{name}." if name else ""
        return {key[len(prefix) :]: each for key, each in self.placements.items() if key.startswith(prefix)}
