"""The measuring order for ranks, apart from its execution, which imports torch."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardwright.cli.asking.model import check_factory

__all__ = ["RANKS", "Order", "refuse_broken"]

RANKS = "shardwright.cli.asking.measuring_ranks"
"""The module that each rank runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order to measure.

    Attributes:
        factory: of the model.
        build_on: the device on which it runs.
        settings: that differ from their defaults.
        out: where rank 0 writes the profile, or the plan.
        most_trials: plans to try; 0: measure alone, and write a profile.
        steps: of a trial.
    """

    factory: str
    build_on: str
    settings: Mapping[str, Any]
    out: str = ""
    most_trials: int = 0
    steps: int = 5

    def to_json(self) -> str:
        """The argument of the ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Order":
        """Reads the output of `to_json`."""
        return cls(**json.loads(text))


def refuse_broken(factory: str, *, build_on: str) -> None:
    """Runs a factory once, so that not every rank reports its error."""
    check_factory(factory)
    # Here, because it imports torch: --help answers before.
    from shardwright.cli.asking.factory import build

    build(factory, device=build_on)
