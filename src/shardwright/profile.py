"""The measured or estimated cost of units, in seconds and bytes; one record serves all.

Units, stages and predictions use the same record. Units of one *cost class* (same class of module, same
shapes) cost the same and are measured once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from shardwright.files.user_file import Bytes, Seconds

Provenance = Literal["measured", "estimated"]


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds and bytes; the costs of consecutive pieces add up.

    Attributes:
        forward_s: seconds of the forward.
        backward_s: seconds of the whole backward, recomputation not counted.
        weight_s: the part of the backward that computes gradients of weights and can be put off (``W``).
        saved_bytes: bytes kept from forward to backward, parameters not counted.
        weight_bytes: bytes that ``I`` leaves for ``W``; None: all of `saved_bytes`, because the gradients of
            weights need the inputs of every layer.
        input_s: seconds of the rest (``I``) where the weights are put off, with what a forward that allows
            for that takes more; None: what `weight_s` leaves of `backward_s`.

    >>> Cost(1.0, 2.0, 1.0, saved_bytes=8) + Cost(1.0, 3.0, input_s=3.5)
    Cost(forward_s=2.0, backward_s=5.0, weight_s=1.0, saved_bytes=8, weight_bytes=None, input_s=4.5)
    """

    forward_s: Seconds
    backward_s: Seconds
    weight_s: Seconds = 0.0
    saved_bytes: Bytes = 0
    weight_bytes: Bytes | None = None
    input_s: Seconds | None = None

    @property
    def rest_s(self) -> float:
        """Seconds of ``I``."""
        return self.backward_s - self.weight_s if self.input_s is None else self.input_s

    @property
    def left_bytes(self) -> int:
        """Bytes that ``I`` leaves."""
        return self.saved_bytes if self.weight_bytes is None else self.weight_bytes

    def scaled(self, *, seconds: float, num_bytes: float) -> Self:
        """The cost with so many times the seconds and the bytes.

        >>> Cost(1.0, 2.0, saved_bytes=8).scaled(seconds=0.5, num_bytes=2.0)
        Cost(forward_s=0.5, backward_s=1.0, weight_s=0.0, saved_bytes=16, weight_bytes=None, input_s=None)
        """
        changed: dict[str, Any] = {}
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if value is not None and name.endswith("_s"):
                changed[name] = value * seconds
            elif value is not None and name.endswith("_bytes"):
                changed[name] = round(value * num_bytes)
        return replace(self, **changed)

    def __add__(self, other: "Cost") -> "Cost":
        in_whole = self.input_s is None and other.input_s is None
        keeps_all = self.weight_bytes is None and other.weight_bytes is None
        return Cost(
            forward_s=self.forward_s + other.forward_s,
            backward_s=self.backward_s + other.backward_s,
            weight_s=self.weight_s + other.weight_s,
            saved_bytes=self.saved_bytes + other.saved_bytes,
            weight_bytes=None if keeps_all else self.left_bytes + other.left_bytes,
            input_s=None if in_whole else self.rest_s + other.rest_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCost(Cost):
    """The cost of one call of a unit on one microbatch.

    Attributes:
        input_bytes: bytes of the input tensors, which is what recomputation keeps instead.
        work_bytes: largest temporary memory on top of what is saved.
        split_work_bytes: `work_bytes` where the backward is split; None: not known, taken as `work_bytes`.
        provenance: where the seconds come from.
        spread: relative spread of the measured seconds (interquartile range / median).
    """

    input_bytes: Bytes = 0
    work_bytes: Bytes = 0
    split_work_bytes: Bytes | None = None
    flops: Annotated[int, Field(ge=0, le=10**30)] = 0
    provenance: Provenance = "estimated"
    spread: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs by cost class.

    Attributes:
        device: name of the device on which it was measured, or for which it was estimated.
    """

    costs: Mapping[str, UnitCost]
    device: str = ""
