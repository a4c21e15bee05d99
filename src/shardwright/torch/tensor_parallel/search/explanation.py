"""How placements were found, as a table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.placement import Placement
from shardwright.torch.tensor_parallel.search.plan_price import PlanPrice
from shardwright.torch.tensor_parallel.search.role import Role

__all__ = ["Attempt", "Explanation", "PartSearched"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """A placement that was tried.

    Attributes:
        role: of the parameters, by its index.
        total_s: of the units concerned, with that and with all that followed.
    """

    start: str
    role: int
    placement: Placement
    total_s: float


@dataclass(frozen=True, slots=True)
class PartSearched:
    """Units that were searched together, because they are alike or share parameters.

    Attributes:
        roles: of their parameters, by index.
        whole: what they cost with all parameters whole.
        starts: what the best plan from each start costs.
        winner: the start of the cheapest.
    """

    units: Sequence[str]
    roles: Sequence[int]
    whole: PlanPrice
    starts: Mapping[str, PlanPrice]
    winner: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """What was tried, and what it would cost.

    Attributes:
        parts: units searched together.
        kept_whole: modules of which no step can be recorded, by name, and why.
    """

    roles: Sequence[Role]
    placements: Sequence[Placement]
    attempts: Sequence[Attempt]
    parts: Sequence[PartSearched]
    kept_whole: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [line for part in self.parts for line in self._lines(part)]
        lines += [
            f"{name or 'the model'} is whole on every rank, because its step cannot be followed: {reason}"
            for name, reason in self.kept_whole.items()
        ]
        return "\n".join(lines)

    def _lines(self, part: PartSearched) -> Iterator[str]:
        more = f" and {len(part.units) - 1} more" if len(part.units) > 1 else ""
        yield f"{part.units[0] or 'the rest of the model'}{more}"
        yield f"  all whole: {part.whole}"
        for name, price in part.starts.items():
            yield f"  from {name}: {price}{'  <- taken' if name == part.winner else ''}"
        for index in part.roles:
            role = self.roles[index]
            more = f" and {len(role.full_names) - 1} like it" if len(role.full_names) > 1 else ""
            yield f"  {role.full_names[0]}{more} {role.shape}: {self.placements[index]}"
            for tried, total_s in self._tried(index).items():
                yield f"      tried {tried}: {total_s * 1e3:.4g} ms"

    def _tried(self, role: int) -> dict[Placement, float]:
        """The least that each placement of a role cost."""
        best: dict[Placement, float] = {}
        for attempt in self.attempts:
            if attempt.role == role:
                best[attempt.placement] = min(best.get(attempt.placement, attempt.total_s), attempt.total_s)
        return best
