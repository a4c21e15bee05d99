"""Gradients of a batch's inputs: trained inputs, or outputs of another model.

Several stages may read an input, each from its own copy. So a step works on its own leaves. At its end, the
leaves' gradients are summed over the replica's ranks and handed to the caller's tensors::

    caller's x ──► leaf on rank 0 ──► stage 0        x.grad  ◄── sum ◄── leaf.grad on ranks 0 and 1
              ╰──► leaf on rank 1 ──► stage 1
"""

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.torch.batch.batch import Batch, is_batch_tensor

__all__ = ["BatchGradients"]


class BatchGradients:
    """The tensors of one batch that require gradients.

    Attributes:
        batch: the same one, with leaves in place of the tensors that require gradients.
    """

    def __init__(self, own: Batch, agreed: Batch):
        self.batch = agreed
        self._leaves: list[Tensor] = []
        self._originals: list[Tensor | None] = []
        items = list(agreed.leaves)
        trained = [p for p, item in enumerate(items) if is_batch_tensor(item) and item.requires_grad]
        if not trained:
            return
        same = own.structure.key == agreed.structure.key
        for position in trained:
            items[position] = leaf = items[position].detach().requires_grad_()
            self._leaves.append(leaf)
            self._originals.append(_matching(own.leaves[position], leaf) if same else None)
        self.batch = agreed.with_leaves(items)

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
