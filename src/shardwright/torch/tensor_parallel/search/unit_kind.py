"""Units that are alike, recorded once, and what plans cost them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.placement import BetweenUnits, Cut, Placement
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.search.flow import Flow
from shardwright.torch.tensor_parallel.search.found_placements import WorkShares
from shardwright.torch.tensor_parallel.search.plan_price import (
    KERNEL_S,
    PlanPrice,
)
from shardwright.torch.tensor_parallel.search.recording import recorded
from shardwright.torch.tensor_parallel.search.unit import Unit

__all__ = ["UnitKind"]


@dataclass(slots=True)
class UnitKind:
    """Units that are alike.

    Attributes:
        kept_whole: modules within one of them, and why.
        roles: of its parameters: index of the role by name.
        priced: what plans cost, by the placements of its roles.
    """

    units: list[tuple[str, Unit]]
    flow: Flow
    kept_whole: Mapping[str, str]
    roles: dict[str, int] = field(default_factory=dict)
    priced: dict[tuple[Placement, ...], tuple[PlanPrice, dict[int, list[Cut]]]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, units: list[tuple[str, Unit]], group: TensorGroup, between: BetweenUnits | None
    ) -> "UnitKind":
        """Records one of some units that are alike."""
        unit, recording = recorded(units[0][1])
        reasons = {name: each.reason for name, each in unit.kept_whole.items()}
        return cls(units, Flow(recording, group, between), reasons)

    def price(
        self, plan: Sequence[Placement], *, num_microbatches: int
    ) -> tuple[PlanPrice, dict[int, list[Cut]]]:
        """What a plan costs one of them, and cuts in which whole parameters would be used, by role."""
        own = {name: plan[index] for name, index in self.roles.items()}
        key = tuple(own.values())
        found = self.priced.get(key)
        if found is None:
            passed = self.flow.run({name: each for name, each in own.items() if isinstance(each, Cut)})
            wants: dict[int, list[Cut]] = {}
            for name, cuts in passed.wants.items():
                if name not in self.roles:  # every rank needs all of it
                    continue
                wanted = wants.setdefault(self.roles[name], [])
                wanted += [cut for cut in cuts if cut not in wanted]
            exchange_s = passed.exchange_s * num_microbatches + passed.settle_s
            price = PlanPrice(passed.work_s * num_microbatches, exchange_s)
            found = self.priced[key] = price, wants
        return found

    def shares(self, plan: Sequence[Placement]) -> WorkShares:
        """Of the work of one of them, by the operations' prices, and what Python takes for each anyway."""
        recording = self.flow.recording
        own = {name: plan[index] for name, index in self.roles.items() if isinstance(plan[index], Cut)}
        part, whole = self.flow.run(own), self.flow.run({}, all_whole=True)
        forward_s = recording.num_forward * KERNEL_S
        backward_s = len(recording.operations) * KERNEL_S - forward_s
        return WorkShares(
            _share(part.forward_work_s, whole.forward_work_s, forward_s),
            _share(part.work_s - part.forward_work_s, whole.work_s - whole.forward_work_s, backward_s),
        )


def _share(part_s: float, whole_s: float, fixed_s: float) -> float:
    return (part_s + fixed_s) / (whole_s + fixed_s) if whole_s + fixed_s else 1.0
