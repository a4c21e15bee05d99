"""Checks the counts in an estimator's arguments."""

from typing import Any

from shardwright.errors import ConfigError
from shardwright.limits import MOST_RANKS_OF_HOST
from shardwright.printable import shown

__all__ = ["check_count", "check_processes"]


def check_count(name: str, value: Any, *, most: int, least: int = 1) -> int:
    """A whole number in its range."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name} is {shown(value)}, but it must be a whole number from {least} to {most}.")
    return value


def check_processes(value: Any) -> int:
    """Checks the number of ranks on a host; raises as `check_count`."""
    return check_count("processes_per_host", value, most=MOST_RANKS_OF_HOST)
