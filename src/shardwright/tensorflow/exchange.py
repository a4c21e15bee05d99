"""Brings the batch to all ranks, and what a step made to those that need it: outputs, gradients, values."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import tensorflow as tf
import torch

from shardwright.comm.message_names import Purpose
from shardwright.comm.tensor_codec import bytes_of
from shardwright.errors import UsageError
from shardwright.model_graph import TensorSpec
from shardwright.run.batch_broadcast import TensorBroadcast
from shardwright.run.context import Context
from shardwright.tensorflow.batch import Arguments
from shardwright.tensorflow.channels import to_tensorflow, to_torch
from shardwright.tensorflow.executor import Results
from shardwright.tensorflow.outputs import Outputs
from shardwright.tensorflow.program import Program
from shardwright.tensorflow.trace import spec_of


class Agreement:
    """Compares and shares what ranks of a replica must have in common."""

    def __init__(self, context: Context):
        self._broadcast: TensorBroadcast | None = None
        if context.links.replica is not None:
            self._broadcast = TensorBroadcast(
                context.links.replica, source=context.pipeline_ranks[0], device=context.device
            )

    def on_batch(self, arguments: Arguments) -> Arguments:
        """The arguments, with the first rank's tensors; collective over the replica.

        Ranks that read data in another order would otherwise compute on parts of different batches.
        """
        if self._broadcast is None:
            return arguments
        self.refuse_text(arguments)
        mine = [to_torch(tensor) for tensor in arguments.tensors]
        tensors = self._broadcast(mine)
        if tensors is mine:
            return arguments
        return replace(arguments, tensors=[to_tensorflow(tensor) for tensor in tensors])

    def refuse_text(self, arguments: Arguments) -> None:
        """Refuses text, where other ranks would get it."""
        if self._broadcast is None:
            return
        for tensor, name in zip(arguments.tensors, arguments.names, strict=True):
            if tensor.dtype == tf.string:
                raise UsageError(
                    f"the argument {name} of the step function is text, which ranks cannot send each other. "
                    "Make numbers of it before: dataset.map(lambda x, y: (vectorize(x), y)) in tf.data."
                )


def exchange_results(
    context: Context, programs: Sequence[Program], results: Results, outputs: Outputs
) -> None:
    """Puts every output where it belongs, into `results`; collective over the replica.

    Gradients go to the rank that holds their variable, all else to every rank.
    """
    _move_gradients(context, programs, results, outputs)
    rank = context.pipeline_rank
    for owner in range(context.mesh.pipeline):
        places = [
            (microbatch, position)
            for microbatch, program in enumerate(programs)
            for position in outputs.shared
            if owner in program.ranks_of_output(position)
        ]
        if not places:
            continue
        specs = [programs[m].graph.specs[programs[m].graph.outputs[position]] for m, position in places]
        mine = [results.kept[m][position] for m, position in places] if rank == owner else None
        tensors = broadcast_tensors(context, mine, specs, owner)
        for (microbatch, position), tensor in zip(places, tensors, strict=True):
            results.kept[microbatch][position] = tensor


def share_variables(context: Context, variables: Sequence[tuple[Any, int]]) -> None:
    """Gives all ranks of the replica the values of variables that one rank has changed.

    They are variables beside the model's own: metrics that the step function updates.
    """
    for owner in sorted({rank for _, rank in variables}):
        group = [variable for variable, rank in variables if rank == owner]
        specs = [spec_of(variable) for variable in group]
        mine = [variable.read_value() for variable in group] if context.pipeline_rank == owner else None
        for variable, value in zip(group, broadcast_tensors(context, mine, specs, owner), strict=True):
            if mine is None:
                variable.assign(value)


def _move_gradients(
    context: Context, programs: Sequence[Program], results: Results, outputs: Outputs
) -> None:
    """Sends gradients that other ranks than the holder of their variable have made, or parts of their sums.

    So it is with tied weights, and where the norm of all gradients is taken inside the step function: the
    first stage clips.
    """
    transport, rank, first = context.links.transport, context.pipeline_rank, programs[0]
    assert transport is not None
    arriving = []
    for position, holder in outputs.holders.items():
        microbatches = [None] if position in outputs.sums else list(range(len(programs)))
        for owner, microbatch in product(first.ranks_of_output(position), microbatches):
            if owner == holder:
                continue
            if microbatch is None:
                spec, store = outputs.sums[position], results.sums
            else:
                program = programs[microbatch]
                spec, store = program.graph.specs[program.graph.outputs[position]], results.kept[microbatch]
            if rank == owner:
                transport.send(to_torch(store.pop(position)), holder)
            elif rank == holder:
                dtype = getattr(torch, spec.dtype)
                receipt = transport.post_receive(spec.shape, owner, dtype=dtype, device=context.device)
                arriving.append((store, position, receipt))
    for store, position, receipt in arriving:
        arrived = to_tensorflow(receipt.wait())
        store[position] = tf.add(store[position], arrived) if position in store else arrived
    transport.flush()


def broadcast_tensors(
    context: Context, mine: Sequence[Any] | None, specs: Sequence[TensorSpec], owner: int
) -> list[Any]:
    """The tensors of one pipeline rank, on all."""
    assert context.links.replica is not None
    num_bytes = sum(spec.num_bytes for spec in specs)
    if mine is not None:
        payload = torch.cat([bytes_of(to_torch(tensor)) for tensor in mine]) if mine else torch.empty(0)
    else:
        payload = torch.empty(num_bytes, dtype=torch.uint8, device=context.device)
    context.links.replica.broadcast([payload], context.pipeline_ranks[owner], Purpose.OUTPUTS)
    if mine is not None:
        return list(mine)
    tensors, offset = [], 0
    for spec in specs:
        piece = payload[offset : offset + spec.num_bytes].clone().view(getattr(torch, spec.dtype))
        tensors.append(to_tensorflow(piece.view(spec.shape)))
        offset += spec.num_bytes
    return tensors
