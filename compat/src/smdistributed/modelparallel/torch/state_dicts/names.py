"""Names and shapes in the state of a model, and how those of two models differ."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from shardwright.errors import CheckpointError

PARTIAL = "_smp_is_partial"
"""Key of a state that has what one rank holds, and not all of it."""

_PREFIX = "module."
_MOST_NAMES = 5


def shapes_in(state: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    """The shape of each entry; None for what is no tensor."""
    return {
        name: tuple(value.shape) if isinstance(value, Tensor) else None
        for name, value in state.items()
        if name != PARTIAL
    }


def check_names(
    own: Mapping[str, tuple[int, ...] | None],
    saved: Mapping[str, tuple[int, ...] | None],
    *,
    source: str,
    strict: bool,
) -> None:
    """Refuses the state of another model.

    Args:
        strict: names must be the same; else only the shapes of those that both have.
    """
    problems: list[str] = []
    if strict:
        only = {"there": saved.keys() - own.keys(), "in the model": own.keys() - saved.keys()}
        problems += [f"{len(n)} names are only {where}: {_listed(n)}" for where, n in only.items() if n]
    other_shapes = [name for name in own if name in saved and saved[name] != own[name]]
    for name in other_shapes[:_MOST_NAMES]:
        problems.append(f"{name} is {saved[name]} there, and {own[name]} in the model")
    if len(other_shapes) > _MOST_NAMES:
        problems.append(f"{len(other_shapes) - _MOST_NAMES} more have other shapes")
    if problems:
        shown = "".join(f"\n  {problem}" for problem in problems)
        loose = " strict=False leaves out names that only one has." if strict and not other_shapes else ""
        raise CheckpointError(
            f"{source} is of another model:{shown}\nBuild the model as it was when it was saved.{loose}"
        )


def without_prefix(state: Mapping[str, Any], own: Iterable[str]) -> dict[str, Any]:
    """A state under the names of the user's module, where it was saved with one hop more (``module.``)."""
    names = set(own)
    given = [name for name in state if name != PARTIAL]
    if not given or any(name in names for name in given) or not all(n.startswith(_PREFIX) for n in given):
        return dict(state)
    return {name.removeprefix(_PREFIX): value for name, value in state.items()}


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _MOST_NAMES
    return ", ".join(ordered[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
