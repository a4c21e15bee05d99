"""How the ranks of a tensor-parallel group share the parameters of a stage."""

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
)

from shardwright.files import Record
from shardwright.limits import MOST_DIMS
from shardwright.placement import Cut
from shardwright.plan.parameter_cuts import CutText, cuts_by_pattern

__all__ = ["TensorPlan", "TensorPrices"]

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class TensorPrices(Record):
    """By which ranks choose the placements of what they compute: all decide alike, as the planner did.

    Attributes:
        latency_s: of a collective of the group.
        bandwidth_Bps: of one rank's connection.
        flops_per_s: of a rank's matrix products.
        memory_Bps: at which a rank reads and writes elements.
    """

    latency_s: Seconds
    bandwidth_Bps: Rate
    flops_per_s: Rate
    memory_Bps: Rate

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

    prices: TensorPrices
    cuts: dict[str, CutText] = Field(default_factory=dict)
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
            cuts: by the names of parameters.
            names: of all parameters of the model.
            prices, between_units, cut_again: see above.
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

    @model_serializer(mode="wrap")
    def _without_whole(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out how tensors are cut where they are not: versions that do not know it read such files."""
        found: dict[str, Any] = serialize(self)
        if found.get("between_units") is None:
            found.pop("between_units", None)
        if found.get("cut_again") is None:
            found.pop("cut_again", None)
        if not found.get("experts"):
            found.pop("experts", None)
        return found
