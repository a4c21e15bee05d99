"""Gradients of the batch: of inputs that are trained themselves, or that another model made.

Several stages may read an input, each on its own copy. So a step works on leaves of its own, and what they
got on all ranks of the replica is summed and handed to the caller's tensors at the end::

    caller's x ──► leaf on rank 0 ──► stage 0        x.grad  ◄── sum ◄── leaf.grad on ranks 0 and 1
              ╰──► leaf on rank 1 ──► stage 1
"""

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.torch.batch.batch import Arguments, is_batch_tensor
from shardwright.torch.pytorch.tree import flatten

__all__ = ["BatchGradients"]


class BatchGradients:
    """The tensors of one batch that require gradients.

    Args:
        own: what this rank's script passed to the step function.
        arguments: the batch of the replica.

    Attributes:
        arguments: the same batch, with leaves in place of the tensors that require gradients.
    """

    def __init__(self, own: Arguments, arguments: Arguments):
        items, structure = flatten(arguments)
        own_items, own_structure = flatten(own)
        same = own_structure.key == structure.key
        self._leaves: list[Tensor] = []
        self._originals: list[Tensor | None] = []
        for position, item in enumerate(items):
            if is_batch_tensor(item) and item.requires_grad:
                items[position] = leaf = item.detach().requires_grad_()
                self._leaves.append(leaf)
                self._originals.append(_matching(own_items[position], leaf) if same else None)
        self.arguments = arguments
        if self._leaves:
            args, kwargs = structure.rebuild(items)
            self.arguments = (args, kwargs)

    def hand_back(self, group: dist.ProcessGroup | None) -> None:
        """Gives the caller's tensors their gradients; collective over the ranks of the replica."""
        if not self._leaves:
            return
        flags = torch.tensor([float(leaf.grad is not None) for leaf in self._leaves])
        flags = flags.to(self._leaves[0].device)
        dist.all_reduce(flags, group=group)
        for leaf, original, flag in zip(self._leaves, self._originals, flags.tolist(), strict=True):
            if not flag:
                continue
            total = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            total = total.contiguous()
            dist.all_reduce(total, group=group)
            if original is not None:
                torch.autograd.backward(original, total.to(original.device))


def _matching(item: object, leaf: Tensor) -> Tensor | None:
    """The caller's tensor, if it is one that can take the gradient of this leaf."""
    if isinstance(item, Tensor) and item.requires_grad and item.shape == leaf.shape:
        return item
    return None
