"""What a plan costs a step."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["KERNEL_S", "MEMORY_WEIGHT", "OPERATION_S", "Goal", "PlanPrice"]

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
