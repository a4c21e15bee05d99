"""Pinned options, as text: ``tensor=8``, ``recompute=full``."""

import difflib
from collections.abc import Iterable, Mapping
from enum import IntEnum

from shardwright.costs import Gathers, Offload, Placement, Recompute, ScheduleKind, Sharded
from shardwright.errors import ConfigError
from shardwright.topology.space import NAMES

__all__ = ["parse_pins", "pin_text", "values_of"]

_CHOICES: Mapping[str, type[IntEnum]] = {
    "schedule": ScheduleKind,
    "sharded": Sharded,
    "recompute": Recompute,
    "offload": Offload,
    "placement": Placement,
    "hierarchical": Gathers,
}
_SWITCHES = frozenset({"sequence_parallel", "flash", "whole_layers"})
_MOST_DIGITS = 12
_SETTING = "expert_parallel_degree"
_OTHER_NAMES = {
    "1f1b": "one_f_one_b",
    "interleaved_1f1b": "interleaved",
    "tp": "tensor",
    "pp": "pipeline",
    "dp": "data",
    "cp": "context",
    "ep": "expert",
    "tensor_parallel_degree": "tensor",
    "pipeline_parallel_degree": "pipeline",
    "data_parallel_degree": "data",
    "context_parallel_degree": "context",
    "sharded_data_parallel_degree": "shard",
    "virtual_stages": "virtual",
    "vp": "virtual",
    "zero": "sharded",
    "mbs": "microbatch",
    "micro_batch_size": "microbatch",
    "m": "microbatches",
    "gradient_accumulation_steps": "microbatches",
    "pipeline_schedule": "schedule",
}


def parse_pins(texts: Iterable[str]) -> dict[str, int]:
    """Reads pins.

    >>> parse_pins(["tp=8, zero=3, recompute=full", "schedule=zb_h1"])
    {'tensor': 8, 'sharded': 3, 'recompute': 2, 'schedule': 3}
    """
    found: dict[str, int] = {}
    experts: int | None = None
    for text in (part.strip() for whole in texts for part in whole.split(",")):
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not value:
            raise ConfigError(f"{text!r} is no option and value, such as tensor=8.")
        if name.lower().replace("-", "_") == _SETTING:
            degree = _value(_SETTING, value)
            if experts not in (None, degree):
                raise ConfigError(f"{_SETTING} is given as {experts} and as {degree}. Give it once.")
            experts = degree
            continue
        name = _name(name)
        number = _value(name, value)
        if found.setdefault(name, number) != number:
            raise ConfigError(f"{name} is given as {found[name]} and as {number}. Give it once.")
    if experts is not None:
        found["expert"] = _expert(experts, found)
    return found


def pin_text(name: str, value: int) -> str:
    """A pin as somebody would write it.

    >>> pin_text("recompute", 2)
    'recompute=full'
    """
    return f"{name}={_CHOICES[name](value).name.lower() if name in _CHOICES else value}"


def values_of(name: str) -> str:
    """The values that a pin takes by name; empty where it takes numbers.

    >>> values_of("recompute")
    'none, selective, full'
    """
    return ", ".join(choice.lower() for choice in _CHOICES[name].__members__) if name in _CHOICES else ""


def _expert(degree: int, pins: Mapping[str, int]) -> int:
    """The pin for this `expert_parallel_degree` of the settings, which counts no ranks of a sequence."""
    if degree > 1 and "context" not in pins:
        raise ConfigError(
            f"{_SETTING}={degree} is a setting, which does not count the ranks of a sequence; the pin expert "
            f"does. Pin context as well: context=1, expert={degree}; or context=2, expert={2 * degree}; ..."
        )
    number = degree * pins["context"] if degree > 1 else degree
    if pins.get("expert", number) != number:
        raise ConfigError(
            f"{_SETTING}={degree} is expert={number} with context={pins.get('context', 1)}, but expert is "
            f"given as {pins['expert']}. Give one of the two."
        )
    return number


def _name(text: str) -> str:
    plain = text.lower().replace("-", "_")
    plain = _OTHER_NAMES.get(plain, plain)
    if plain in NAMES:
        return plain
    near = difflib.get_close_matches(plain, [*NAMES, *_OTHER_NAMES, _SETTING], n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"they are {', '.join(NAMES)}."
    raise ConfigError(f"{text!r} is no option of a topology; {hint}")


def _value(name: str, text: str) -> int:
    if name in _CHOICES and not text.isdecimal():
        plain = text.lower().replace("-", "_")
        plain = _OTHER_NAMES.get(plain, plain).upper()
        choices = _CHOICES[name]
        if plain not in choices.__members__:
            raise ConfigError(f"{name} is {text!r}, but it must be one of {values_of(name)}.")
        return int(choices[plain])
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        shown = text if len(text) <= _MOST_DIGITS else f"{text[:_MOST_DIGITS]}..."
        raise ConfigError(
            f"{name} is {shown!r}, but it must be a whole number of at most {_MOST_DIGITS} digits."
        )
    number = int(text)
    if name in _SWITCHES and number > 1:
        raise ConfigError(f"{name} is {number}, but it must be 0 or 1.")
    if name in _CHOICES and number not in list(_CHOICES[name]):
        raise ConfigError(f"{name} is {number}, but it must be from 0 to {len(_CHOICES[name]) - 1}.")
    return number
