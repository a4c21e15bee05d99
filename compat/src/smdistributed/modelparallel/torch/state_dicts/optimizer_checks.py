"""Refuses loaded states of optimizers, each with a `CheckpointError` that says how they differ."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from shardwright.errors import CheckpointError


def refuse_other_groups(state: Mapping[str, Any], num_groups: int) -> None:
    if not {"state", "param_groups"} <= state.keys():
        raise CheckpointError(
            "this is no state of an optimizer: it has no state and param_groups, but "
            f"{', '.join(map(str, list(state)[:5])) or 'nothing'}."
        )
    if len(state["param_groups"]) != num_groups:
        raise CheckpointError(
            f"the state of an optimizer with {len(state['param_groups'])} parameter groups does not fit "
            f"one with {num_groups}. Make the groups as they were when it was saved."
        )


def refuse_unknown(here: Sequence[str], known: Sequence[str]) -> None:
    """Refuses a state that leaves out parameters of this rank."""
    missing = sorted(set(here) - set(known))
    if missing:
        raise CheckpointError(
            f"the state is of {len(known)} parameters, and not of {len(missing)} that this rank has, for "
            f"example {missing[0]}. It is of another model, or was saved by ranks with other parameters: "
            "then load what all of them have saved."
        )


def refuse_part(part: Any) -> None:
    """Refuses a part of a state that ranks share."""
    if part:
        raise CheckpointError(
            f"the state of the optimizer is a part of one that ranks share ({part}), and of other parameters "
            "than this rank has. Load it with the partition and the ranks that saved it."
        )


def check_shapes(name: str, parameter: Tensor, entry: Mapping[str, Any]) -> None:
    """Refuses state of another shape than the parameter has."""
    for key, value in entry.items():
        if not isinstance(value, Tensor) or value.shape == parameter.shape:
            continue
        # Some optimizers keep rows and columns apart: with fewer dimensions, or with 1 for some.
        dims = zip(value.shape, parameter.shape, strict=False)
        if value.dim() == parameter.dim() and all(size in (1, whole) for size, whole in dims):
            continue
        if value.dim() and value.dim() >= parameter.dim():
            raise CheckpointError(
                f"{key} of {name} has the shape {tuple(value.shape)} in the state, and {name} has "
                f"{tuple(parameter.shape)} here. The state is of another model, or its parameters had "
                "another order."
            )
