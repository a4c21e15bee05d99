"""How the ranks of a tensor-parallel group share parameters, in a plan: one line for parameters alike.

::

    "cuts": {
      "h.*.attn.qkv.weight": "cut 0 (r0:64 r1:64 r0:64 r1:64 r0:64 r1:64)",
      "h.*.mlp.down.weight": "cut 1 (r0:256 r1:256)",
      "head.weight": "cut 0 (r0:50128 r1:50129)"
    }

A ``*`` stands for one number. A parameter has the cut of its own name, else that of the pattern that has its
last number (of an expert: ``h.*.experts.3.w1.weight``), else that of the one with a ``*`` for all numbers;
without any, each rank has all of it.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationInfo,
    field_validator,
)

from shardwright.errors import StalePlanError
from shardwright.files import Record
from shardwright.files.user_file import Positive, Seconds
from shardwright.placement import Cut
from shardwright.quantities import MOST_DIMS

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def _cut(value: Any) -> Cut:
    if isinstance(value, Cut):
        return value
    if not isinstance(value, str):
        raise ValueError("it must be a text such as 'cut 0 (r0:2 r1:3)'")
    return Cut.parse(value)


_CutText = Annotated[Cut, PlainValidator(_cut), PlainSerializer(str, return_type=str)]
"""A cut; in files, its text."""


def pattern_of(name: str) -> str:
    """The pattern of parameters with the same role.

    >>> pattern_of("h.11.attn.c_attn1.weight")
    'h.*.attn.c_attn1.weight'
    """
    return _NUMBER.sub("*", name)


def _pattern_with_last_number(name: str) -> str:
    """The pattern of parameters of one expert, in all layers.

    >>> _pattern_with_last_number("h.11.experts.3.w1.weight")
    'h.*.experts.3.w1.weight'
    """
    *_, last = [0, *(each.start() for each in _NUMBER.finditer(name))]
    return pattern_of(name[:last]) + name[last:]


def cuts_by_pattern(cuts: Mapping[str, Cut], names: Sequence[str]) -> dict[str, Cut]:
    """The shortest record of cuts, in the order of the parameters."""
    found: dict[str, Cut] = {}
    for pattern, members in _grouped(names, pattern_of).items():
        cut = _common(cuts, members)
        if cut is not None:
            found[pattern if len(members) > 1 else members[0]] = cut
            continue
        for closer, fewer in _grouped(members, _pattern_with_last_number).items():
            cut = _common(cuts, fewer)
            if cut is not None:
                found[closer if len(fewer) > 1 else fewer[0]] = cut
            else:
                found |= {name: cuts[name] for name in fewer if name in cuts}
    return found


def _grouped(names: Sequence[str], key: Callable[[str], str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(key(name), []).append(name)
    return found


def _common(cuts: Mapping[str, Cut], names: Sequence[str]) -> Cut | None:
    """The cut that all of some parameters have; None where they differ, or one is whole."""
    first = cuts.get(names[0])
    return first if all(cuts.get(name) == first for name in names) else None


def cuts_by_name(record: Mapping[str, Cut], shapes: Mapping[str, Sequence[int]]) -> dict[str, Cut]:
    """The cuts of parameters by name: the inverse of `cuts_by_pattern`."""
    unused = set(record)
    found: dict[str, Cut] = {}
    for name, shape in shapes.items():
        for key in (name, _pattern_with_last_number(name), pattern_of(name)):
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


class TensorPrices(Record):
    """By which ranks choose the placements of what they compute: all decide alike, as the planner did.

    Attributes:
        latency_s: of a collective of the group.
        bandwidth_Bps: of one rank's connection.
        flops_per_s: of a rank's matrix products.
        memory_Bps: at which a rank reads and writes elements.
    """

    latency_s: Seconds
    bandwidth_Bps: Positive
    flops_per_s: Positive
    memory_Bps: Positive

    def exchange_s(self, calls: float, num_bytes: float) -> float:
        """Seconds of so many collectives, in which a rank sends so many bytes."""
        return calls * self.latency_s + num_bytes / self.bandwidth_Bps


class TensorPlan(Record):
    """The decisions of a plan with a tensor degree.

    Attributes:
        prices: of changes of placement, and of work.
        cuts: of parameters, by names or patterns of names (see `parameter_cuts`); each rank has all of the
            others.
        between_units: the dimension along which tensors between units are cut: 0 the batch, 1 the sequence.
            None, and left out of files, where every rank has all of them.
        cut_again: the dimension along which tensor ranks cut each context or expert rank's part of them, too;
            left out of files where they do not.
        experts: those of `cuts` of which all ranks that share a batch have different parts, where some of
            these ranks share layers; left out of files where there are none.
    """

    left_out: ClassVar = ("between_units", "cut_again", "experts")

    prices: TensorPrices
    cuts: dict[str, _CutText] = Field(default_factory=dict)
    between_units: Annotated[int, Field(ge=0, le=MOST_DIMS)] | None = None
    cut_again: Annotated[int, Field(ge=0, le=MOST_DIMS)] | None = None
    experts: tuple[str, ...] = ()

    @field_validator("experts")
    @classmethod
    def _cut(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if unknown := [name for name in value if name not in info.data.get("cuts", value)]:
            raise ValueError(f"it names {unknown[0]}, which tensor.cuts does not")
        return value

    @classmethod
    def of(
        cls,
        cuts: Mapping[str, Cut],
        names: Sequence[str],
        prices: TensorPrices,
        *,
        between_units: int | None = None,
        cut_again: int | None = None,
        experts: Collection[str] = (),
    ) -> Self:
        """The plan with these cuts.

        Args:
            names: of all parameters of the model.
            experts: names of the parameters of experts.
        """
        by_pattern = cuts_by_pattern(cuts, names)
        of_experts = cuts_by_pattern({name: cuts[name] for name in experts}, names)
        return cls(
            prices=prices,
            cuts=by_pattern,
            between_units=between_units,
            cut_again=cut_again,
            experts=tuple(name for name in by_pattern if name in of_experts),
        )
