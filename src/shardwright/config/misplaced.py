"""Points out settings that are given to a call in place of ``init``."""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from shardwright.config.config import Config
from shardwright.errors import ConfigError, UsageError
from shardwright.printable import shown

__all__ = ["refuse_misplaced"]


def refuse_misplaced(call: str, others: Mapping[str, Any], *, takes: Collection[str]) -> None:
    """Refuses options that a call does not have.

    >>> refuse_misplaced("@sw.step", {"split_list": ["x"]}, takes=["split_lists"])
    Traceback (most recent call last):
    shardwright.errors.UsageError: @sw.step has no option split_list. Did you mean split_lists?
    """
    for name, value in others.items():
        raise UsageError(f"{call} has no option {name}{_remedy(name, value, takes)}")


def _remedy(name: str, value: Any, takes: Collection[str]) -> str:
    if name in Config.model_fields or _is_other_name(name, value):
        text = f'sw.init({{"{name}": {shown(value)}}})'
        return f": it is a setting of the run. Write {text}, or shardwright run --set {name}={value}."
    close = get_close_matches(name, [*takes, *Config.model_fields], n=1, cutoff=0.6)
    if close and close[0] in takes:
        return f". Did you mean {close[0]}?"
    if close:
        return f". Did you mean the setting {close[0]} of sw.init?"
    return f": it has {', '.join(takes)}." if takes else ": it takes none of its own."


def _is_other_name(name: str, value: Any) -> bool:
    """Whether it is a setting by a name of another library, such as ``partitions``."""
    try:
        Config.parse({name: value})
    except ConfigError as error:
        return "is not a setting" not in str(error)
    return True
