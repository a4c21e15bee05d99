"""Reads numbers from files of a run, which somebody may have changed since."""

import math
from collections.abc import Mapping
from typing import Any

from shardwright.errors import UsageError
from shardwright.printable import shown

__all__ = ["FOREIGN", "finite", "number_or_none", "to_number"]

FOREIGN = "The file was damaged, or something else wrote it: remove it, or name another run."


def number_or_none(record: Mapping[str, Any], name: str, where: str) -> float | None:
    """A number of a record; None where it has none, or has NaN or infinity."""
    value = record.get(name)
    number = None if value is None else to_number(value, name, where)
    return number if number is not None and math.isfinite(number) else None


def finite(value: Any, name: str, where: str) -> float:
    """A number that must be there; raises as `number_or_none`."""
    number = to_number(value, name, where)
    if not math.isfinite(number):
        raise UsageError(f"{where}: {name} is {number}, but it must be finite. {FOREIGN}")
    return number


def to_number(value: Any, name: str, where: str) -> float:
    """A number, also one of those that JSON does not have; raises as `number_or_none`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        # float() also reads "NaN" and "Infinity", which is how JsonLines writes them.
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{where}: {name} is {shown(value)}, but it must be a number. {FOREIGN}") from error
