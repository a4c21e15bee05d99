"""Maps saved optimizer state to parameters by name; PyTorch numbers parameters by position.

The positions are those of another run, whose model may have registered its parts in another order.
"""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["state_by_name"]


def state_by_name(
    saved: Mapping[str, Any], theirs: Sequence[str], mine: Sequence[Sequence[str]]
) -> dict[str, Any] | None:
    """The part of a saved state that some parameters need, in their order.

    >>> groups = [{"lr": 0.1, "params": [0, 1]}]
    >>> state_by_name({"state": {0: "of a", 1: "of b"}, "param_groups": groups}, ["a", "b"], [["b"]])
    {'state': {0: 'of b'}, 'param_groups': [{'lr': 0.1, 'params': [0]}]}
    """
    groups: list[dict[str, Any]] = saved["param_groups"]
    numbers = [(place, number) for place, group in enumerate(groups) for number in group["params"]]
    if len(groups) != len(mine) or len(numbers) != len(theirs):
        return None
    found = dict(zip(theirs, numbers, strict=True))
    wanted = [(place, name) for place, names in enumerate(mine) for name in names]
    if any(not name or name not in found or found[name][0] != place for place, name in wanted):
        return None
    state: dict[int, Any] = {}
    chosen = [{**group, "params": []} for group in groups]
    for now, (place, name) in enumerate(wanted):
        chosen[place]["params"].append(now)
        number = found[name][1]
        if number in saved["state"]:
            state[now] = saved["state"][number]
    return {**saved, "state": state, "param_groups": chosen}
