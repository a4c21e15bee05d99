"""The entries of a Hugging Face configuration, each checked where it is read."""

from collections.abc import Mapping
from typing import Any

from shardwright.errors import ConfigError
from shardwright.printable import shown

__all__ = ["Document", "Fields"]

Document = Mapping[str, Any]

_MOST = 10**9
_MOST_LAYERS = 100_000


class Fields:
    """Entries of a configuration, checked; of several names, the first that it has counts."""

    def __init__(self, document: Document):
        self._document = document

    def inner(self, name: str) -> "Fields":
        """The fields of a part of the model; of a file that has no such part, its own."""
        found = self._document.get(name)
        if found is None:
            return self
        if not isinstance(found, Mapping):
            raise ConfigError(f"{name} is {shown(found)}, but it must be an object.")
        return Fields({"model_type": self.kind, **found})

    def windowed(self, layers: int, *, every: int) -> int:
        """How many layers attend to a window; where no list says it, all but one in `every`."""
        kinds = self._document.get("layer_types")
        if kinds is None:
            return layers - layers // every
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise ConfigError(
                f"layer_types is {shown(kinds)}, but it must list the kinds of {layers} layers."
            )
        return sum(kind != "full_attention" for kind in kinds)

    def number(self, *names: str, default: int | None = None, least: int = 1) -> int:
        given = (self._document.get(name) for name in names)
        found = next((value for value in given if value is not None), default)
        if found is None:
            raise ConfigError(f"{names[0]} is missing in the configuration of the model.")
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= _MOST:
            raise ConfigError(
                f"{names[0]} is {shown(found)}, but it must be a whole number from {least} to {_MOST}."
            )
        return found

    def layers(self, *names: str, default: int | None = None) -> int:
        """A checked number of layers, since code walks through each of them."""
        found = self.number(*names, default=default)
        if found > _MOST_LAYERS:
            raise ConfigError(f"{names[0]} is {found}, but it must be at most {_MOST_LAYERS}.")
        return found

    @property
    def kind(self) -> str:
        return str(self._document["model_type"])

    def refuse_other(self, name: str, only: object) -> None:
        """Refuses a field that is there with another value than the only one that is read."""
        found = self._document.get(name)
        if found not in (None, only):
            raise ConfigError(
                f"{name} is {shown(found)}, but only {only!r} can be read. Pass the model itself "
                "(package.module:function) instead of its configuration."
            )

    def text(self, name: str, default: str) -> str:
        found = self._document.get(name, default)
        if not isinstance(found, str):
            raise ConfigError(f"{name} is {shown(found)}, but it must be text.")
        return found

    def flag(self, name: str, default: bool) -> bool:
        found = self._document.get(name)
        if found is not None and not isinstance(found, bool):
            raise ConfigError(f"{name} is {shown(found)}, but it must be true or false.")
        return default if found is None else found
