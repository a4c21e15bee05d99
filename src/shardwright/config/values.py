"""The kinds of values that settings have, with their limits."""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from shardwright.limits import (
    MOST_ELEMENTS,
    MOST_MICROBATCHES,
    MOST_RANKS,
    MOST_SECONDS,
    MOST_STAGES_OF_RANK,
    MOST_STEPS,
    MOST_UNITS,
)
from shardwright.printable import control_in

__all__ = [
    "Degree",
    "Elements",
    "Microbatches",
    "Name",
    "Norm",
    "Port",
    "Seconds",
    "Seed",
    "Stages",
    "Steps",
    "Units",
    "Weight",
    "Whole",
    "no_bool",
]


def no_bool(value: Any) -> Any:
    """Refuses true and false, which pydantic reads as 1 and 0: a slip would become "one microbatch"."""
    if isinstance(value, bool):
        raise ValueError("it must be a number")
    return value


def _no_control(value: str) -> str:
    if (control := control_in(value)) is not None:
        raise ValueError(f"it must not have control characters such as {control}")
    return value


Whole = Annotated[int, BeforeValidator(no_bool)]
Degree = Annotated[Whole, Field(ge=1, le=MOST_RANKS)]
Microbatches = Annotated[Whole, Field(ge=1, le=MOST_MICROBATCHES)]
Stages = Annotated[Whole, Field(ge=1, le=MOST_STAGES_OF_RANK)]
Elements = Annotated[Whole, Field(ge=1, le=MOST_ELEMENTS)]
Steps = Annotated[Whole, Field(ge=1, le=MOST_STEPS)]
Units = Annotated[Whole, Field(ge=1, le=MOST_UNITS)]
Seed = Annotated[Whole, Field(ge=0, lt=2**63)]
Norm = Annotated[float, BeforeValidator(no_bool), Field(gt=0.0, allow_inf_nan=False)]
Weight = Annotated[float, BeforeValidator(no_bool), Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, BeforeValidator(no_bool), Field(gt=0.0, le=MOST_SECONDS)]
Name = Annotated[str, AfterValidator(_no_control)]
Port = Annotated[int, BeforeValidator(no_bool), Field(ge=1, le=65535)]
