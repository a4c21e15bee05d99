"""The state of a whole model, on every rank, from what each rank has of it."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.comm.process_group import tell_all
from shardwright.errors import UsageError
from shardwright.torch.context import Context
from shardwright.torch.residency import Residency

__all__ = ["gather_state", "rank_that_runs"]


def gather_state(
    state: dict[str, Any], module: nn.Module, residency: Residency, context: Context
) -> dict[str, Any]:
    """Fills in what other ranks hold; collective over the replica.

    Parameters and buffers come from the rank that holds them. Anything else, such as a module's extra state
    or what was registered after the first step, comes from the rank that runs the module around it.

    Args:
        state: the `state_dict` of this rank.
        module: the user's module.
        residency: who holds what.
        context: the run.

    Returns:
        A copy: training on does not change it.

    Raises:
        UsageError: it has parameters or buffers of other ranks under names that these do not know.
    """
    full: dict[str, Any] = type(state)()
    if hasattr(state, "_metadata"):
        full._metadata = state._metadata  # type: ignore[attr-defined]
    first_names = {id(t): n for n, t in (*module.named_parameters(), *module.named_buffers())}
    by_key: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    by_key.update(module.named_buffers(remove_duplicate=False))
    if not by_key.keys() >= state.keys():
        # A module whose state_dict is its own, such as a wrapper for fp16 that is not in the names.
        by_key.update(_renamed(module, first_names))
    others: dict[str, Any] = {}
    for key, value in state.items():
        name = first_names.get(id(by_key[key])) if key in by_key else None
        if name is None or name not in residency.ranks or not isinstance(value, Tensor):
            full[key] = others[key] = value
            continue
        owner = residency.ranks[name][0]
        if owner == context.pipeline_rank:
            payload = value.detach().clone(memory_format=torch.contiguous_format)
        else:
            payload = torch.empty(value.shape, dtype=value.dtype, device=context.device)
        if payload.numel():
            dist.broadcast(payload, context.pipeline_ranks[owner], group=context.pipeline_group)
        full[key] = payload
    full.update(_from_their_ranks(others, residency, context))
    _sort(full, list(state), context)
    lost = [key for key, value in full.items() if isinstance(value, Tensor) and value.is_meta]
    if lost:
        raise UsageError(
            f"model.state_dict() finds {len(lost)} tensors of other ranks under names that these do not "
            f"have, for example {lost[0]}: hooks that rename, or modules that were changed after the first "
            "step (pruning). Change and rename before the first step, or rename in the dictionary that "
            "model.state_dict() returns."
        )
    return full


def _renamed(module: nn.Module, known: dict[int, str]) -> dict[str, Tensor]:
    """Parameters and buffers by their names in the state, whatever these are."""
    kept = module.state_dict(keep_vars=True)
    return {key: value for key, value in kept.items() if isinstance(value, Tensor) and id(value) in known}


def _from_their_ranks(others: dict[str, Any], residency: Residency, context: Context) -> dict[str, Any]:
    own = {
        key: value.detach().clone() if isinstance(value, Tensor) else value
        for key, value in others.items()
        if rank_that_runs(key, residency) == context.pipeline_rank
    }
    gathered = tell_all(own, group=context.pipeline_group, objects=True)
    found: dict[str, Any] = {}
    for part in gathered:
        found.update(part)
    return found


def _sort(full: dict[str, Any], own: list[str], context: Context) -> None:
    """Brings names in the order of a plain model: what others have made in a forward comes last here.

    Each goes behind the one that it follows on a rank that has it.

    Args:
        full: the whole state.
        own: names in the state of this rank.
        context: the run.
    """
    orders = tell_all(own, group=context.pipeline_group)
    names: list[str] = []
    for order in orders:
        if order == names:
            continue
        known, place = set(names), 0
        for name in order:
            if name in known:
                place = names.index(name, place if name in names[place : place + 1] else 0)
            else:
                names.insert(place, name)
            place += 1
    for name in names if names != list(full) else ():
        if name in full:
            full[name] = full.pop(name)


def rank_that_runs(key: str, residency: Residency) -> int | None:
    """The rank that runs the innermost module around something; None where several do."""
    path = key.rpartition(".")[0]
    while path:
        ranks = {holders for name, holders in residency.ranks.items() if name.startswith(f"{path}.")}
        if ranks:
            (first, *more) = ranks
            return None if more or len(first) > 1 else first[0]
        path = path.rpartition(".")[0]
    return None
