"""Gives the tensors that a step function returned to every rank of the replica.

Small ones (losses) come in the row by which ranks compare what they have computed; others are broadcast.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from shardwright.comm.message_names import Purpose
from shardwright.comm.tensor_codec import bytes_of
from shardwright.errors import TraceMismatchError
from shardwright.model_graph import TensorSpec
from shardwright.run.context import Context
from shardwright.torch.execution.loss_weights import LossWeights
from shardwright.torch.interception.deferred import DeferredTensor
from shardwright.torch.program.program import Program
from shardwright.torch.pytorch.tree import flatten

_ROOM = 64  # numbers of 8 bytes in the row of a rank, for its outputs


@dataclass(frozen=True, slots=True)
class Returned:
    """The values that a step function returned for one microbatch.

    Attributes:
        result: with deferred tensors where another rank has the value.
        values: (position among its leaves, value) of what only one rank has.
        loss_at: position of what was given to ``backward``; None if that was not returned.
        behind_end: it went on behind the end of its program.
        loss: what was given to ``backward`` and not returned, on the rank that has it.
    """

    result: Any
    values: tuple[tuple[int, int], ...]
    loss_at: int | None
    trains: bool
    behind_end: bool = False
    loss: Tensor | None = None


class Told(NamedTuple):
    """What all ranks have told each other.

    Attributes:
        small: the small outputs of all: (ranks, bytes) uint8 on the CPU.
    """

    small: Tensor
    figures: list[list[float]] | None


class Outputs:
    """What the ranks of a replica have made of the outputs of one batch."""

    def __init__(self, context: Context, returned: Sequence[Returned], programs: Sequence[Program]):
        self._context = context
        self._programs = programs
        self._returned = [_with_loss(each, program) for each, program in zip(returned, programs, strict=True)]
        self._flat = [flatten(each.result) for each in self._returned]
        self._of_owner: list[list[tuple[int, int, int]]] = [[] for _ in range(context.mesh.pipeline)]
        for microbatch, (each, program) in enumerate(zip(self._returned, programs, strict=True)):
            for position, value in each.values:
                owner = program.stage_ranks[program.home_of[value]]
                self._of_owner[owner].append((microbatch, position, value))

    def refuse_other_paths(self, losses: LossWeights, figures: Sequence[float] = ()) -> Told:
        """Refuses what ranks have computed if it was not the same microbatches, each by the same graph.

        Collective over the replica; to be called before anything else that depends on what was computed.
        """
        context = self._context
        assert context.links.replica is not None
        paths = [
            (program.trace.graph.fingerprint, each.behind_end, each.trains, each.values, each.loss_at)
            for program, each in zip(self._programs, self._returned, strict=True)
        ]
        weights = losses.row
        told = [float(crc32(repr(paths).encode())), *weights, *figures]
        row = torch.zeros(len(told) + _ROOM, dtype=torch.float64, device=context.device)
        row[: len(told)] = torch.tensor(told, dtype=torch.float64)
        mine = self._of_owner[context.pipeline_rank]
        if mine and self._num_bytes(mine) <= 8 * _ROOM:
            payload = self._payload(mine)
            row[len(told) :].view(torch.uint8)[: len(payload)] = payload
        rows = context.links.replica.gather(row, Purpose.AGREEMENT).cpu()
        numbers = rows[:, : len(told)].tolist()
        different = [place for place, other in enumerate(numbers) if other[0] != told[0]]
        if different:
            ranks = ", ".join(str(context.replica_ranks[place]) for place in different)
            raise TraceMismatchError(
                f"rank {context.rank} took another path through the step function than "
                f"{'rank' if len(different) == 1 else 'ranks'} {ranks}, so that losses and gradients of this "
                "step are wrong. Let nothing in the step function depend on what only this rank knows: its "
                "number, its own parameters and gradients, files, the time, sets in their order."
            )
        end = 1 + len(weights)
        losses.take([other[1:end] for other in numbers])
        small = rows[:, len(told) :].contiguous().view(torch.uint8)
        return Told(small, [other[end:] for other in numbers] if figures else None)

    @property
    def has_all_losses(self) -> bool:
        """Whether all ranks will have the losses."""
        return all(each.loss_at is not None or not each.trains for each in self._returned)

    def exchange(self, small: Tensor) -> tuple[list[Any], list[Tensor | None], list[tuple[int, ...]]]:
        """Gives all stages of the replica what each has made; collective over them."""
        context, flat = self._context, self._flat
        assert context.links.stages is not None
        for owner, places in enumerate(self._of_owner):
            if not places:
                continue
            num_bytes = self._num_bytes(places)
            if num_bytes <= 8 * _ROOM:
                row = small[context.replica_ranks.index(context.pipeline_ranks[owner])]
                payload = row[:num_bytes].to(context.device)
            else:
                payload = torch.empty(num_bytes, dtype=torch.uint8, device=context.device)
                if owner == context.pipeline_rank:
                    payload = self._payload(places)
                context.links.stages.broadcast([payload], context.pipeline_ranks[owner], Purpose.OUTPUTS)
            for (microbatch, position, _), piece in zip(places, self._pieces(payload, places), strict=True):
                flat[microbatch][0][position] = piece
        flat = [([_detach(item) for item in items], structure) for items, structure in flat]
        losses = [
            None if each.loss_at is None else items[each.loss_at]
            for (items, _), each in zip(flat, self._returned, strict=True)
        ]
        of_losses = [
            _losses_in(each, program) for each, program in zip(self._returned, self._programs, strict=True)
        ]
        return [structure.rebuild(items)[0] for items, structure in flat], losses, of_losses

    # ---- inside ----

    def _spec(self, place: tuple[int, int, int]) -> TensorSpec:
        return self._programs[place[0]].trace.graph.values[place[2]].spec

    def _num_bytes(self, places: Sequence[tuple[int, int, int]]) -> int:
        return sum(self._spec(place).num_bytes for place in places)

    def _payload(self, places: Sequence[tuple[int, int, int]]) -> Tensor:
        return torch.cat([bytes_of(self._flat[m][0][position]) for m, position, _ in places])

    def _pieces(self, payload: Tensor, places: Sequence[tuple[int, int, int]]) -> Sequence[Tensor]:
        """The tensors of which bytes are made, with memory of their own."""
        specs = [self._spec(place) for place in places]
        first = specs[0]
        if all((spec.dtype, spec.shape) == (first.dtype, first.shape) for spec in specs):  # losses, mostly
            alike = payload.clone().view(getattr(torch, first.dtype)).view(len(specs), *first.shape)
            return alike.unbind(0)
        parts = torch.split(payload, [spec.num_bytes for spec in specs])
        return [
            part.clone().view(getattr(torch, spec.dtype)).view(spec.shape)
            for part, spec in zip(parts, specs, strict=True)
        ]


def _losses_in(each: Returned, program: Program) -> tuple[int, ...]:
    """Where a result has the loss, or another view of it (``loss.detach()``)."""
    facts, loss = program.trace.tensors, program.trace.graph.loss
    if loss is None or each.behind_end:
        return () if each.loss_at is None else (each.loss_at,)
    memory = facts.memory[loss]
    return tuple(place for place, value in each.values if facts.memory[value] == memory)


def _with_loss(each: Returned, program: Program) -> Returned:
    """The result, and behind it the loss, of which a script may give its backward a part."""
    graph = program.trace.graph
    paired = replace(each, result=(each.result, each.loss))
    if each.loss_at is not None or each.behind_end or not each.trains or graph.loss is None:
        return paired
    if math.prod(graph.values[graph.loss].spec.shape) != 1:
        return paired
    place = len(flatten(each.result)[0])
    return replace(paired, values=(*each.values, (place, graph.loss)), loss_at=place)


def _detach(item: Any) -> Any:
    return item.detach() if isinstance(item, Tensor) and not isinstance(item, DeferredTensor) else item
