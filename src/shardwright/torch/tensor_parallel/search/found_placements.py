"""What a search for placements has found, what it costs a step, and how it was found."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shardwright.placement import Placement
from shardwright.torch.tensor_parallel.search.unit import Role

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

    def __str__(self) -> str:
        return (
            f"{self.total_s * 1e3:.4g} ms (work {self.work_s * 1e3:.4g}, "
            f"exchange {self.exchange_s * 1e3:.4g}, memory {self.memory_s * 1e3:.4g})"
        )


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
