"""Numbers in files: finite, of a size that can be meant, and bytes also as text."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from shardwright.errors import ConfigError
from shardwright.quantities import parse_bytes

__all__ = ["NonNegative", "NumBytes", "Positive"]

Positive = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]


def _bytes(value: Any) -> Any:
    try:
        return parse_bytes(value)
    except ConfigError:
        raise ValueError("it must be a size such as 40GiB, or a number of bytes") from None


NumBytes = Annotated[int, BeforeValidator(_bytes)]
"""A number of bytes, or a text such as 40GiB."""
