"""All architectures by name."""

from architecture import Architecture
from architectures_other import OTHER_ARCHITECTURES
from architectures_text import TEXT_ARCHITECTURES

__all__ = ["ARCHITECTURES"]

ARCHITECTURES: dict[str, Architecture] = TEXT_ARCHITECTURES | OTHER_ARCHITECTURES
