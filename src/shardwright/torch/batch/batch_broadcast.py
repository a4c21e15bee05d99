"""Broadcasts the arguments of a replica's first rank to its other ranks."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from shardwright.comm.transport import SmallCollectives
from shardwright.errors import UsageError
from shardwright.run.batch_broadcast import Room, TensorBroadcast
from shardwright.torch.batch.batch import Arguments, Batch, is_batch_tensor
from shardwright.torch.batch.batch_header import Leaf, Outline, outline, read_header, written_header
from shardwright.torch.batch.splitter import refuse_packed
from shardwright.torch.pytorch.tensors import from_memory_order, in_memory_order, order_of
from shardwright.torch.pytorch.tree import LEAF, Structure, flatten

__all__ = ["BatchBroadcast", "loaded_another"]

_PLAIN = (bool, int, float, str, bytes, complex, slice, torch.dtype, torch.device)


class BatchBroadcast:
    """Gives all ranks of a replica the arguments of its first rank.

    Tensors and plain values (numbers, text, None, arrays of NumPy) come from the first rank; anything else
    (the model, an optimizer, a namespace of options) is each rank's own object at the same place.
    """

    def __init__(self, replica: SmallCollectives, *, source: int, device: torch.device):
        self._tensors = TensorBroadcast(replica, source=source, device=device)
        self._outline: Outline | None = None
        self._leaves: list[Leaf] = []
        self._structure = LEAF

    def __call__(self, arguments: Arguments) -> Arguments:
        """Collective over the replica."""
        items, structure = flatten(arguments)
        if self._tensors.is_source:
            self._send(items, structure)
            return arguments
        tensors = iter(self._tensors.receive(partial(self._read, structure)))
        described, common = self._leaves, self._structure
        taken: list[Any] = []
        for position, leaf in enumerate(described):
            if leaf.kind == "tensor":
                tensor = from_memory_order(next(tensors), leaf.order)
                taken.append(tensor.requires_grad_() if leaf.requires_grad else tensor)
            elif leaf.kind == "value":
                taken.append(leaf.value)
            elif len(items) == len(described) and structure.key == common.key:
                taken.append(items[position])
            else:
                raise UsageError(
                    f"the first rank of the replica passes a {leaf.value} to the step function, which "
                    "cannot be sent, and this rank passes other arguments. Pass the same objects on "
                    "every rank; tensors may differ."
                )
        args, kwargs = common.rebuild(taken)
        return args, kwargs

    def _send(self, items: Sequence[Any], structure: Structure) -> None:
        described = [_describe(item) for item in items]
        now = outline(described, structure)
        header = None
        if now is None or now != self._outline:
            refuse_packed(structure)
            header, self._outline = written_header(described, structure, self._tensors.seal), now
        device = self._tensors.device
        tensors = [
            in_memory_order(item.detach().to(device), leaf.order)
            for item, leaf in zip(items, described, strict=True)
            if leaf.kind == "tensor"
        ]
        self._tensors.send(tensors, header)

    def _read(self, own: Structure, header: bytes) -> Room:
        self._leaves, self._structure = read_header(header, own, self._tensors.seal)
        return [
            (leaf.shape, leaf.dtype)
            for leaf in self._leaves
            if leaf.kind == "tensor" and leaf.dtype is not None
        ]


def _describe(item: Any) -> Leaf:
    if is_batch_tensor(item):
        if item.layout is not torch.strided or item.is_nested:
            raise UsageError(
                f"a tensor of shape {tuple(item.shape)} in the batch has the layout {item.layout}, and only "
                "dense ones are sent to the other ranks. Pass its parts to the step function, named in "
                "non_split_inputs, and build it there: adj = adj.coalesce(); train_step(model, x, "
                "adj.indices(), adj.values()), and in it torch.sparse_coo_tensor(indices, values, size)."
            )
        order = order_of(item)
        shape = tuple(in_memory_order(item, order).shape)
        return Leaf("tensor", shape, item.dtype, item.requires_grad, order)
    if item is None or type(item) in _PLAIN or isinstance(item, np.generic | np.ndarray):
        return Leaf("value", value=item)
    return Leaf("local", value=type(item).__name__)


def loaded_another(own: Batch, agreed: Batch) -> bool:
    """Whether a batch of the same form has another first or last sample; zeros just fill a place."""
    mine, theirs = own.leaves, agreed.leaves
    if len(mine) != len(theirs):
        return False
    for item, other in zip(mine, theirs, strict=True):
        if not is_batch_tensor(item) or not is_batch_tensor(other):
            continue
        if item is other or not item.dim() or not len(item):
            return False
        if item.shape != other.shape or item.dtype != other.dtype:
            return False
        with torch.no_grad():
            ends, others = item[[0, -1]], other[[0, -1]].to(item.device)
            return bool(ends.any()) and not torch.allclose(ends, others, rtol=0, atol=0, equal_nan=True)
    return False
