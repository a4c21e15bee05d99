"""What each unit costs: seconds and bytes, measured or estimated.

Units of one *cost class* (same class of module, same shapes) cost the same and are measured once.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Profile", "Provenance", "UnitCost"]

Provenance = Literal["measured", "estimated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCost:
    """The cost of one call of a unit on one microbatch.

    Attributes:
        forward_s: seconds of the forward.
        backward_s: seconds of the whole backward.
        weight_s: the part of the backward that computes gradients of weights and can be put off (``W``).
        saved_bytes: bytes kept from forward to backward, parameters not counted.
        input_bytes: bytes of the input tensors, which is what recomputation keeps instead.
        work_bytes: largest temporary memory on top of what is saved.
        weight_bytes: bytes that ``I`` leaves for ``W``; None: not known, taken as all of `saved_bytes`.
        split_work_bytes: `work_bytes` where the backward is split; None: not known, taken as `work_bytes`.
        input_s: seconds of the rest (``I``) where it is put off, with what a forward that allows for that
            takes more; None: what `weight_s` leaves of `backward_s`.
        flops: floating-point operations of the forward.
        provenance: where the seconds come from.
        spread: relative spread of the measured seconds (interquartile range / median).
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    saved_bytes: int = 0
    input_bytes: int = 0
    work_bytes: int = 0
    weight_bytes: int | None = None
    split_work_bytes: int | None = None
    input_s: float | None = None
    flops: int = 0
    provenance: Provenance = "estimated"
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs by cost class.

    Attributes:
        costs: cost class -> cost.
        device: name of the device on which it was measured, or for which it was estimated.
    """

    costs: Mapping[str, UnitCost]
    device: str = ""

    def to_dict(self) -> dict[str, Any]:
        """A form that `json` can write."""
        return {"device": self.device, "costs": {key: asdict(cost) for key, cost in self.costs.items()}}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "Profile":
        """Reads what `to_dict` wrote."""
        costs = {key: UnitCost(**cost) for key, cost in document["costs"].items()}
        return cls(costs=costs, device=str(document.get("device", "")))
