"""Which modules a script wants distributed: a mark on each, so that copies of it have it, too."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwright.torch.pytorch.modules import CreationWatch

_MARK = "_smp_tensor_parallelism"


@dataclass(frozen=True, slots=True)
class Wish:
    """What a script wants of a module.

    Attributes:
        enabled: it is distributed; else it stays as it is.
    """

    enabled: bool
    options: Mapping[str, Any] = field(default_factory=dict)


def set_mark(module: nn.Module, wish: Wish) -> None:
    """Marks a module alone, without those inside."""
    vars(module)[_MARK] = (wish.enabled, dict(wish.options))


_CREATIONS: CreationWatch[Wish] = CreationWatch(set_mark)


@contextmanager
def marking(wish: Wish) -> Iterator[None]:
    """Marks the modules that are created inside; the innermost wish wins."""
    with _CREATIONS.inside(wish):
        yield


def wish_of(module: nn.Module) -> Wish | None:
    """What the script wants of a module; None where it has not said anything."""
    mark = vars(module).get(_MARK)
    return None if mark is None else Wish(*mark)


def wishes_in(model: nn.Module) -> bool:
    """Whether the script has said anything of a module in here."""
    return any(_MARK in vars(module) for module in model.modules())
