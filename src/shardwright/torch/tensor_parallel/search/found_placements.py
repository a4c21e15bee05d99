"""What a search for placements has found."""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.placement import Placement
from shardwright.torch.tensor_parallel.search.explanation import Explanation
from shardwright.torch.tensor_parallel.search.plan_price import (
    PlanPrice,
)

__all__ = ["FoundPlacements", "WorkShares"]


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
        explanation: how it was found; printed, it is a table.
    """

    placements: Mapping[str, Placement]
    price: PlanPrice
    whole_price: PlanPrice
    divided: float
    kind_of: Mapping[str, str]
    shares: Mapping[str, WorkShares]
    kept_whole: Mapping[str, str]
    explanation: Explanation

    def of_unit(self, name: str) -> dict[str, Placement]:
        """Placements of the parameters of one unit, by their names within it."""
        prefix = f"{name}." if name else ""
        return {key[len(prefix) :]: each for key, each in self.placements.items() if key.startswith(prefix)}
