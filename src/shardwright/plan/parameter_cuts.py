"""How the ranks of a tensor-parallel group share parameters, in a plan: one line for parameters alike.

::

    "cuts": {
      "h.*.attn.qkv.weight": "cut 0 (r0:64 r1:64 r0:64 r1:64 r0:64 r1:64)",
      "h.*.mlp.down.weight": "cut 1 (r0:256 r1:256)",
      "head.weight": "cut 0 (r0:50128 r1:50129)"
    }

A ``*`` stands for one number. A parameter has the cut of its own name, else that of the one pattern that fits
it; without either, each rank has all of it.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator

from shardwright.errors import StalePlanError
from shardwright.placement import Cut

__all__ = ["CutText", "cuts_by_name", "cuts_by_pattern", "pattern_of"]

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def _cut(value: Any) -> Cut:
    if isinstance(value, Cut):
        return value
    if not isinstance(value, str):
        raise ValueError("it must be a text such as 'cut 0 (r0:2 r1:3)'")
    return Cut.parse(value)


CutText = Annotated[Cut, PlainValidator(_cut), PlainSerializer(str, return_type=str)]
"""A cut; in files, its text."""


def pattern_of(name: str) -> str:
    """The pattern of parameters with the same role.

    >>> pattern_of("h.11.attn.c_attn1.weight")
    'h.*.attn.c_attn1.weight'
    """
    return _NUMBER.sub("*", name)


def cuts_by_pattern(cuts: Mapping[str, Cut], names: Sequence[str]) -> dict[str, Cut]:
    """The shortest record of cuts, in the order of the parameters.

    Args:
        cuts: of parameters, by name.
        names: of all parameters of the model: one that is whole needs the others of its pattern by name.
    """
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(pattern_of(name), []).append(name)
    found: dict[str, Cut] = {}
    for pattern, members in alike.items():
        of_members = [cuts.get(name) for name in members]
        first = of_members[0]
        if first is not None and all(each == first for each in of_members):
            found[pattern if len(members) > 1 else members[0]] = first
        else:
            found |= {name: cuts[name] for name in members if name in cuts}
    return found


def cuts_by_name(record: Mapping[str, Cut], shapes: Mapping[str, Sequence[int]]) -> dict[str, Cut]:
    """The cuts of parameters by name: the inverse of `cuts_by_pattern`.

    Args:
        record: of a plan.
        shapes: of all parameters of the model.

    Raises:
        StalePlanError: a name or pattern fits no parameter, or a cut does not fit its shape.
    """
    unused = set(record)
    found: dict[str, Cut] = {}
    for name, shape in shapes.items():
        for key in (name, pattern_of(name)):
            if key in record:
                unused.discard(key)
                found.setdefault(name, record[key])
        if name in found:
            _check(name, shape, found[name])
    if unused:
        raise StalePlanError(
            f"the plan cuts {', '.join(sorted(unused))}, but the model has no such parameters. Make the plan "
            "anew."
        )
    return found


def _check(name: str, shape: Sequence[int], cut: Cut) -> None:
    size = shape[cut.dim] if cut.dim < len(shape) else None
    if cut.size != size:
        raise StalePlanError(
            f"the plan has {cut} for {name}, of {cut.size} slices, but that has shape {tuple(shape)}. Make "
            "the plan anew."
        )
