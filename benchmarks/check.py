"""Targets, and whether they are met."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Check", "lines"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One figure against its target.

    Attributes:
        section: letter of the section.
        what: the figure.
        value: as measured; the worst of several.
        target: what is wanted.
        at_least: the target is a lower bound, not an upper one.
        where: the configuration with the worst value.
        percent: print as a percentage.
    """

    section: str
    what: str
    value: float
    target: float
    at_least: bool = False
    where: str = ""
    percent: bool = False

    @property
    def passes(self) -> bool:
        """Met, to two decimals: what is printed decides."""
        value, target = round(self.value, 2), round(self.target, 2)
        return value >= target if self.at_least else value <= target

    @property
    def margin(self) -> float:
        """By how much the target is met, as a share of it (of 1 where it is 0); negative: it is missed."""
        return (self.value - self.target) / (self.target or 1.0) * (1 if self.at_least else -1)

    def line(self) -> str:
        """``A  1F1B: ours / peer  1.01  target <= 1.00  MISS  (4 ranks, 8 microbatches)``."""
        form = "{:.0%}" if self.percent else "{:.2f}"
        sign = ">=" if self.at_least else "<="
        verdict = "pass" if self.passes else "MISS"
        return (
            f"{self.section}  {self.what:<58}  {form.format(self.value):>5}  target {sign} "
            f"{form.format(self.target):>4}  {verdict}{f'  ({self.where})' if self.where else ''}"
        )


def lines(checks: Sequence[Check]) -> list[str]:
    """One line a target, the worst figure last."""
    return [check.line() for check in sorted(checks, key=lambda check: -check.margin)]
