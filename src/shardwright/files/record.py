"""The base class for records that are read from files."""

from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

__all__ = ["Record"]


class Record(BaseModel):
    """Frozen; fields that are not known are errors, and true is not 1."""

    # Validators are made with the first object of a class: most processes use few of the classes.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and _is_number(cls.model_fields[str(info.field_name)].annotation):
            raise ValueError("it must be a number")
        return value


def _is_number(annotation: Any) -> bool:
    kinds = set(_kinds(annotation))
    return not kinds.isdisjoint((int, float)) and bool not in kinds


def _kinds(annotation: Any) -> Any:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for inside in get_args(annotation):
            yield from _kinds(inside)
    else:
        yield annotation
