"""A figure as predicted and as measured."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Beside", "Compared", "worst_of"]


class Beside(Protocol):
    """Anything with a predicted and a measured value."""

    @property
    def predicted(self) -> float | None: ...

    @property
    def measured(self) -> float | None: ...


def worst_of(rows: Iterable[Beside], *, least: float = 0.0) -> int | None:
    """The number of the row that is furthest above its prediction; None where none is above it.

    >>> worst_of([Compared("a (s)", 1.0, 1.5), Compared("b (s)", 3.0, 3.6), Compared("c (s)", None, 9.0)])
    1
    """
    above = {
        number: row.measured - row.predicted
        for number, row in enumerate(rows)
        if row.predicted is not None and row.measured is not None
    }
    worst = max(above, key=lambda number: above[number], default=None)
    return worst if worst is not None and above[worst] > least else None


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure as predicted and as measured; None where it is not known.

    Attributes:
        predicted: in the unit that the name ends with.
        remark: why the two are not to be compared; empty where they are.
    """

    name: str
    predicted: float | None
    measured: float | None
    remark: str = ""

    @property
    def above(self) -> float | None:
        """measured / predicted - 1; None where one is not known, or they are not to be compared."""
        if not self.predicted or self.measured is None or self.remark:
            return None
        return self.measured / self.predicted - 1.0

    def to_dict(self) -> dict[str, Any]:
        """A form that `json` can write: the unit is in the names of the numbers."""
        name, _, unit = self.name.removesuffix(")").rpartition(" (")
        return {
            "name": name,
            f"predicted_{unit}": self.predicted,
            f"measured_{unit}": self.measured,
            "above_prediction": self.above,
            "remark": self.remark,
        }
