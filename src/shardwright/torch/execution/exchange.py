"""Gives the tensors that a step function returned to every rank of the replica.

Small ones (losses) come in the row by which ranks compare what they have computed; others are broadcast.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from shardwright.comm.encoding.tensor_bytes import bytes_of
from shardwright.comm.identity.purpose import Purpose
from shardwright.errors import TraceMismatchError
from shardwright.torch.execution.loss_weights import LossWeights
from shardwright.torch.interception.deferred import DeferredTensor
from shardwright.torch.program.program import Program
from shardwright.torch.pytorch.tree import flatten
from shardwright.torch.run.context import Context

__all__ = ["Returned", "exchange_outputs", "refuse_other_paths"]

_ROOM = 64  # numbers of 8 bytes in the row of a rank, for its outputs


@dataclass(frozen=True, slots=True)
class Returned:
    """The values that a step function returned for one microbatch.

    Attributes:
        result: with deferred tensors where another rank has the value.
        values: (position among its leaves, value) of what only one rank has.
        loss_at: position of what was given to ``backward``; None if that was not returned.
        trains: it has called ``backward``.
        behind_end: it went on behind the end of its program.
        loss: what was given to ``backward`` and not returned, on the rank that has it.
    """

    result: Any
    values: tuple[tuple[int, int], ...]
    loss_at: int | None
    trains: bool
    behind_end: bool = False
    loss: Tensor | None = None


def exchange_outputs(
    context: Context, returned: Sequence[Returned], programs: Sequence[Program], small: Tensor
) -> tuple[list[Any], list[Tensor | None], list[tuple[int, ...]]]:
    """Gives all stages of the replica what each has made; collective over them.

    Args:
        context: the run.
        returned: what the step function returned on this rank, by microbatch.
        programs: of each microbatch.
        small: what `refuse_other_paths` has given.

    Returns:
        The results with all tensors in place, without autograd history; the loss of each microbatch; where
        its result has that loss.
    """
    assert context.links.stages is not None
    returned = [_with_loss(each, program) for each, program in zip(returned, programs, strict=True)]
    flat = [flatten(each.result) for each in returned]
    for owner in range(context.mesh.pipeline):
        places = _places(returned, programs, owner)
        if not places:
            continue
        specs = [programs[microbatch].trace.graph.values[value].spec for microbatch, _, value in places]
        num_bytes = sum(spec.num_bytes for spec in specs)
        if num_bytes <= 8 * _ROOM:
            row = small[context.replica_ranks.index(context.pipeline_ranks[owner])]
            payload = row[:num_bytes].to(context.device)
        else:
            payload = torch.empty(num_bytes, dtype=torch.uint8, device=context.device)
            if owner == context.pipeline_rank:
                payload = torch.cat([bytes_of(flat[m][0][position]) for m, position, _ in places])
            context.links.stages.broadcast([payload], context.pipeline_ranks[owner], Purpose.OUTPUTS)
        offset = 0
        for (microbatch, position, _), spec in zip(places, specs, strict=True):
            piece = payload[offset : offset + spec.num_bytes].clone().view(getattr(torch, spec.dtype))
            flat[microbatch][0][position] = piece.view(spec.shape)
            offset += spec.num_bytes
    flat = [([_detach(item) for item in items], structure) for items, structure in flat]
    losses = [
        None if each.loss_at is None else items[each.loss_at]
        for (items, _), each in zip(flat, returned, strict=True)
    ]
    of_losses = [_losses_in(each, program) for each, program in zip(returned, programs, strict=True)]
    return [structure.rebuild(items)[0] for items, structure in flat], losses, of_losses


def _losses_in(each: Returned, program: Program) -> tuple[int, ...]:
    """Where a result has the loss, or another view of it (``loss.detach()``)."""
    facts, loss = program.trace.tensors, program.trace.graph.loss
    if loss is None or each.behind_end:
        return () if each.loss_at is None else (each.loss_at,)
    memory = facts.memory[loss]
    return tuple(place for place, value in each.values if facts.memory[value] == memory)


def _with_loss(each: Returned, program: Program) -> Returned:
    """The result and the loss behind it: who returns a loss, and gives its backward a part of it, has both.

    A loss of many numbers is none to report, and stays where it is.
    """
    graph = program.trace.graph
    paired = replace(each, result=(each.result, each.loss))
    if each.loss_at is not None or each.behind_end or not each.trains or graph.loss is None:
        return paired
    if math.prod(graph.values[graph.loss].spec.shape) != 1:
        return paired
    place = len(flatten(each.result)[0])
    return replace(paired, values=(*each.values, (place, graph.loss)), loss_at=place)


def _places(
    returned: Sequence[Returned], programs: Sequence[Program], owner: int
) -> list[tuple[int, int, int]]:
    """(microbatch, position in the result, value) of everything that one pipeline rank made."""
    return [
        (microbatch, position, value)
        for microbatch, (each, program) in enumerate(zip(returned, programs, strict=True))
        for position, value in each.values
        if program.stage_ranks[program.home_of[value]] == owner
    ]


def _detach(item: Any) -> Any:
    return item.detach() if isinstance(item, Tensor) and not isinstance(item, DeferredTensor) else item


def refuse_other_paths(
    context: Context, returned: Sequence[Returned], programs: Sequence[Program], losses: LossWeights
) -> Tensor:
    """Refuses what ranks have computed if it was not the same microbatches, each by the same graph.

    Collective over the replica; to be called before anything else that depends on what was computed.

    Args:
        context: the run.
        returned: what the step function returned on this rank, by microbatch.
        programs: of each microbatch.
        losses: how much each counts; the rank that has them tells the others.

    Returns:
        The small outputs of all ranks: (ranks, bytes) uint8 on the CPU.

    Raises:
        TraceMismatchError: ranks of the replica have computed other things in this step.
    """
    assert context.links.replica is not None
    paths = [
        (program.trace.graph.fingerprint, each.behind_end, each.trains, each.values)
        for program, each in zip(programs, returned, strict=True)
    ]
    told = [float(crc32(repr(paths).encode())), *losses.row]
    here = torch.tensor(told, dtype=torch.float64, device=context.device)
    mine = torch.cat([here, _small_outputs(context, returned, programs)])
    rows = context.links.replica.gather(mine, Purpose.AGREEMENT).cpu()
    different = [place for place, path in enumerate(rows[:, 0].tolist()) if path != told[0]]
    if different:
        ranks = ", ".join(str(context.replica_ranks[place]) for place in different)
        raise TraceMismatchError(
            f"rank {context.rank} took another path through the step function than "
            f"{'rank' if len(different) == 1 else 'ranks'} {ranks}, so that losses and gradients of this "
            "step are wrong. Let nothing in the step function depend on what only this rank knows: its "
            "number, its own parameters and gradients, files, the time, sets in their order."
        )
    losses.take(rows[:, 1:-_ROOM])
    return rows[:, -_ROOM:].contiguous().view(torch.uint8)


def _small_outputs(context: Context, returned: Sequence[Returned], programs: Sequence[Program]) -> Tensor:
    """What this rank has made of the outputs, as numbers; zeros where that is more than there is room for."""
    small = torch.zeros(8 * _ROOM, dtype=torch.uint8, device=context.device)
    paired = [_with_loss(each, program) for each, program in zip(returned, programs, strict=True)]
    places = _places(paired, programs, context.pipeline_rank)
    specs = (programs[microbatch].trace.graph.values[value].spec for microbatch, _, value in places)
    if places and sum(spec.num_bytes for spec in specs) <= 8 * _ROOM:
        flat = [flatten(each.result)[0] for each in paired]
        payload = torch.cat([bytes_of(flat[m][position]) for m, position, _ in places])
        small[: len(payload)] = payload
    return small.view(torch.float64)
