"""Gathers parameter values, and the state of the whole model, on every rank."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.comm.joining.process_group import tell_all
from shardwright.errors import UsageError
from shardwright.run.context import Context
from shardwright.torch._private.tensors import put_in_place
from shardwright.torch.parameters.residency import Residency, make_remote
from shardwright.torch.parameters.sharded_tensor import ShardedTensor
from shardwright.torch.pytorch.functions import RELEASED
from shardwright.torch.tensor_parallel.divide import shown_in_parts, shown_whole
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, whole


@contextmanager
def gathered_values(
    module: nn.Module, residency: Residency, context: Context, parts: Sequence[nn.Module | Tensor]
) -> Iterator[None]:
    """Inside, this rank has the values of some parameters and buffers, whoever holds them.

    A holder keeps what they are changed to, of a parameter that ranks share its own part; every other rank
    lets go of its copies at the end::

        rank 0 holds q     q            q, k      k.lerp_(q, 0.1)      q
        rank 1 holds k     k            q, k      k.lerp_(q, 0.1)      k, as it is now
    """
    named = dict((*module.named_parameters(), *module.named_buffers()))
    wanted = _wanted(parts, {id(tensor): name for name, tensor in named.items()}) if parts else named.keys()
    copies: list[tuple[Tensor, str]] = []
    shared: list[tuple[Tensor, DividedTensor]] = []
    try:
        for name, tensor in named.items():
            if name not in wanted or name not in residency.ranks:
                continue
            owner, away = residency.ranks[name][0], hasattr(tensor, RELEASED)
            if away:
                payload = torch.empty(tensor.shape, dtype=tensor.dtype, device=context.device)
            else:
                if isinstance(tensor, DividedTensor):
                    shared.append((tensor, shown_whole(tensor)))
                rows = tensor.full() if isinstance(tensor, ShardedTensor) else tensor
                payload = rows.detach().contiguous()
            if payload.numel():
                dist.broadcast(payload, context.pipeline_ranks[owner], group=context.groups.pipeline)
            if away:
                copies.append((tensor, name))
                _fill(tensor, payload)
        yield
    finally:
        for tensor, kept in shared:
            shown_in_parts(tensor, kept)
        for tensor, name in copies:
            holders = [context.pipeline_ranks[rank] for rank in residency.ranks[name]]
            make_remote(tensor, name, holders, device=context.device)


def _wanted(parts: Sequence[nn.Module | Tensor], names: dict[int, str]) -> set[str]:
    found = set()
    for part in parts:
        modules = (part.parameters(), part.buffers()) if isinstance(part, nn.Module) else ((part,),)
        for tensor in (tensor for group in modules for tensor in group):
            if id(tensor) not in names:
                raise UsageError(
                    f"model.gathered() gets a tensor of shape {tuple(tensor.shape)} that is no parameter and "
                    "no buffer of the wrapped model. Pass its modules (model.module.teacher) or parameters."
                )
            found.add(names[id(tensor)])
    return found


def _fill(tensor: Tensor, values: Tensor) -> None:
    """Gives a tensor without values some, for everybody who has it."""
    delattr(tensor, RELEASED)
    is_parameter = isinstance(tensor, nn.Parameter)
    if values.stride() != tensor.stride():
        laid_out = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=values.device
        )
        values = laid_out.copy_(values)
    full = nn.Parameter(values, requires_grad=tensor.requires_grad) if is_parameter else values
    put_in_place(tensor, full)


def gather_state(
    state: dict[str, Any], module: nn.Module, residency: Residency, context: Context
) -> dict[str, Any]:
    """Fills in what other ranks hold; collective over the replica.

    Parameters and buffers come from the rank that holds them. Anything else, such as a module's extra state
    or what was registered after the first step, comes from the rank that runs the module around it.
    """
    sources = _Sources(state, module, residency, context)
    full: dict[str, Any] = type(state)()
    if hasattr(state, "_metadata"):
        full._metadata = state._metadata  # type: ignore[attr-defined]
    full.update({key: value for key, value in state.items() if not sources.is_gone(key)})
    for key in sources.order:
        if (source := sources.of(key)) is not None:
            full[key] = sources.tensor(key, source)
    others = {k: v for k, v in full.items() if not isinstance(v, Tensor)}
    if sources.have_objects:
        full.update(_from_their_ranks(others, residency, context))
    for key in sources.order if sources.order != list(full) else ():
        if key in full:
            full[key] = full.pop(key)
    lost = [key for key, value in full.items() if isinstance(value, Tensor) and value.is_meta]
    if lost:
        raise UsageError(
            f"model.state_dict() finds {len(lost)} tensors of other ranks under names that these do not "
            f"have, for example {lost[0]}: hooks that rename, or modules that were changed after the first "
            "step (pruning). Change and rename before the first step, or rename in the dictionary that "
            "model.state_dict() returns."
        )
    return full


class _Sources:
    """The rank, shape and type of each tensor's source: a forward may have given a buffer others.

    Attributes:
        order: all names, as a plain model has them.
        have_objects: some rank has something that is no tensor.
    """

    def __init__(self, state: dict[str, Any], module: nn.Module, residency: Residency, context: Context):
        self._context = context
        self._owners = _owners(state, module, residency)
        rank = context.pipeline_rank
        self._own = {
            key: value
            for key, value in state.items()
            if isinstance(value, Tensor)
            and not value.is_meta
            and (self._owners.get(key, rank_that_runs(key, residency)) == rank)
        }
        said = {
            "names": list(state),
            "own": {
                key: [list(v.shape), str(v.dtype).removeprefix("torch.")] for key, v in self._own.items()
            },
            "objects": any(not isinstance(value, Tensor) for value in state.values()),
        }
        self._said = tell_all(said, group=context.groups.pipeline)
        self.order = _merged([each["names"] for each in self._said])
        self.have_objects = any(each["objects"] for each in self._said)

    def of(self, key: str) -> int | None:
        """The first pipeline rank that gives a tensor; None where none does."""
        return next((rank for rank, each in enumerate(self._said) if key in each["own"]), None)

    def is_gone(self, key: str) -> bool:
        """Whether the rank that holds a buffer has none any more (`self.cache = None`)."""
        owner = self._owners.get(key)
        return owner is not None and key not in self._said[owner]["names"]

    def tensor(self, key: str, source: int) -> Tensor:
        """A tensor of one rank, on all; collective over the replica."""
        context = self._context
        if source == context.pipeline_rank:
            payload = whole(self._own[key]).clone(memory_format=torch.contiguous_format)
        else:
            shape, dtype = self._said[source]["own"][key]
            payload = torch.empty(shape, dtype=getattr(torch, dtype), device=context.device)
        if payload.numel():
            dist.broadcast(payload, context.pipeline_ranks[source], group=context.groups.pipeline)
        return payload


def _owners(state: dict[str, Any], module: nn.Module, residency: Residency) -> dict[str, int]:
    """The pipeline rank that holds each parameter and buffer, by its name in the state."""
    first_names = {id(t): n for n, t in (*module.named_parameters(), *module.named_buffers())}
    by_key: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    by_key.update(module.named_buffers(remove_duplicate=False))
    if not by_key.keys() >= state.keys():
        # A module whose state_dict is its own, such as a wrapper for fp16 that is not in the names.
        by_key.update(_renamed(module, first_names))
    names = {key: first_names.get(id(by_key[key]), "") for key in state if key in by_key}
    return {key: residency.ranks[name][0] for key, name in names.items() if name in residency.ranks}


def _renamed(module: nn.Module, known: dict[int, str]) -> dict[str, Tensor]:
    """Parameters and buffers by their names in the state, whatever these are."""
    kept = module.state_dict(keep_vars=True)
    return {key: value for key, value in kept.items() if isinstance(value, Tensor) and id(value) in known}


def _from_their_ranks(others: dict[str, Any], residency: Residency, context: Context) -> dict[str, Any]:
    own = {
        key: value for key, value in others.items() if rank_that_runs(key, residency) == context.pipeline_rank
    }
    gathered = tell_all(own, group=context.groups.pipeline, objects=True)
    found: dict[str, Any] = {}
    for part in gathered:
        found.update(part)
    return found


def _merged(orders: list[list[str]]) -> list[str]:
    """All names in the order of a plain model: what others have made in a forward comes last on a rank."""
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
    return names


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
