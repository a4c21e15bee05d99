"""The arguments of a step function, for a whole batch or one microbatch; and the gradients of its inputs.

Several stages may read an input, each from its own copy. So a step works on its own leaves. At its end, the
leaves' gradients are summed over the replica's ranks and handed to the caller's tensors::

    caller's x ──► leaf on rank 0 ──► stage 0        x.grad  ◄── sum ◄── leaf.grad on ranks 0 and 1
              ╰──► leaf on rank 1 ──► stage 1
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.runtime.step_function import microbatch_sizes
from shardwright.torch.batch.splitter import Argument, CutTensor, Splitter, cuts_itself, is_batch_tensor
from shardwright.torch.pytorch.tree import Structure, flatten

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a function: (args, kwargs)."""


class Batch:
    """The arguments of a step function, flattened once.

    A microbatch is a batch, too: `split` gives as many as are wanted. Leaves are those of before the step
    function has run, whatever it does to the containers that it gets.

    Attributes:
        alike: an earlier microbatch, of which this one differs in the values of tensors alone.
    """

    def __init__(self, arguments: Arguments, splitter: Splitter | None = None):
        self.arguments = arguments
        self.alike: Batch | None = None
        self._splitter = Splitter() if splitter is None else splitter

    @cached_property
    def _flat(self) -> tuple[list[Any], Structure]:
        leaves = [leaf for argument in self._named for leaf in argument.leaves]
        if any(map(cuts_itself, leaves)):  # it may hold some
            return flatten(self.arguments)
        args, kwargs = self.arguments
        structures = [argument.structure for argument in self._named]
        positional = Structure("sequence", args, (), structures[: len(args)])
        by_name = Structure("dict", kwargs, tuple(kwargs), structures[len(args) :])
        return leaves, Structure("sequence", self.arguments, (), [positional, by_name])

    @cached_property
    def _named(self) -> list[Argument]:
        return self._splitter.named(*self.arguments)

    @property
    def leaves(self) -> Sequence[Any]:
        """All that is in the arguments, depth first."""
        return self._flat[0]

    @property
    def structure(self) -> Structure:
        return self._flat[1]

    @cached_property
    def num_samples(self) -> int | None:
        """The size of the first tensor that is cut, along its axis; None if none is."""
        return self._cut[0][2] if self._cut else None

    @cached_property
    def _cut(self) -> list[CutTensor]:
        return self._splitter.cut_tensors(self._named)

    @property
    def is_kept_whole(self) -> bool:
        """Whether the script has said that none of its tensors is cut."""
        return self.num_samples is None and self._splitter.keeps_whole(self._named)

    @property
    def in_one(self) -> bool:
        """Whether it is one microbatch, whatever the plan says."""
        return self._splitter.in_one

    @property
    def described_kinds(self) -> str:
        """The arguments beside the model with their types, for a message; empty without any."""
        others = [(name, tree) for name, tree, *_ in self._named if not isinstance(tree, nn.Module)]
        kinds = ", ".join(f"{name} ({type(tree).__name__})" for name, tree in others)
        return f" among {kinds}" if kinds else ""

    @property
    def num_tokens(self) -> int | None:
        """Entries of its first tensor; None if that is not a matrix of whole numbers."""
        first = next((leaf for each in self._named for leaf in each.leaves if is_batch_tensor(leaf)), None)
        if first is None:  # it may be in an object that cuts itself
            first = next(filter(is_batch_tensor, self.leaves), None)
        if first is None or first.dtype not in (torch.int64, torch.int32) or first.dim() != 2:
            return None
        return int(first.numel())

    def named_leaves(self) -> list[tuple[str, Any, bool]]:
        """The name of the argument of each leaf, the leaf, and whether it is a tensor that is cut."""
        return [
            (argument.name, leaf, self._splitter.cuts(argument.name, leaf))
            for argument in self._named
            for leaf in argument.leaves
        ]

    def with_arguments(self, arguments: Arguments) -> Self:
        return type(self)(arguments, self._splitter)

    def with_leaves(self, leaves: Sequence[Any]) -> Self:
        args, kwargs = self.structure.rebuild(leaves)
        made = self.with_arguments((args, kwargs))
        made._flat = list(leaves), self.structure
        return made

    def to(self, device: torch.device) -> Self:
        if device.type == "cpu":
            return self
        return self.with_leaves(
            [leaf.to(device, non_blocking=True) if is_batch_tensor(leaf) else leaf for leaf in self.leaves]
        )

    def copied(self) -> Self:
        """With tensors of its own.

        Microbatches are views of one batch. Where a step function changes them in place, autograd would take
        a change of one for a change of all.
        """
        return self.with_leaves([leaf.clone() if is_batch_tensor(leaf) else leaf for leaf in self.leaves])

    def changed(self, change: Callable[[Sequence[tuple[Tensor, int]]], Sequence[Tensor]]) -> Self:
        """With other tensors in the place of those that are cut into microbatches."""
        trees = self._splitter.changed(self._named, change)
        num_args, kwargs = len(self.arguments[0]), self.arguments[1]
        return self.with_arguments(
            (tuple(trees[:num_args]), dict(zip(kwargs, trees[num_args:], strict=True)))
        )

    def take_changes(self, copy: "Batch") -> None:
        """Puts what a step function did to a copy into the caller's tensors."""
        with torch.no_grad():
            for leaf, new in zip(self.leaves, copy.leaves, strict=True):
                if is_batch_tensor(leaf) and leaf.shape == new.shape:
                    leaf.copy_(new)

    def split(self, num_microbatches: int) -> list[Self]:
        """The microbatches; the first ones are larger where the sizes do not divide."""
        num_args, kwargs = len(self.arguments[0]), self.arguments[1]
        parts = []
        samples = self.num_samples
        sizes = [] if samples is None else microbatch_sizes(samples, num_microbatches)
        are_alike = self._splitter.cuts_alike(self._named)
        first_of: dict[int, Batch] = {}
        for index, arguments in enumerate(self._splitter.split(self._named, self._cut, num_microbatches)):
            trees = [argument.tree for argument in arguments]
            part = self.with_arguments(
                (tuple(trees[:num_args]), dict(zip(kwargs, trees[num_args:], strict=True)))
            )
            part._named = arguments
            if sizes:
                part.num_samples = sizes[index]
                if are_alike and (first := first_of.setdefault(sizes[index], part)) is not part:
                    part.alike = first
            parts.append(part)
        return parts


class BatchGradients:
    """The tensors of one batch that require gradients.

    Attributes:
        batch: with leaves in their place.
        originals: the caller's tensors.
    """

    def __init__(self, own: Batch, agreed: Batch):
        self.batch = agreed
        self._leaves: list[Tensor] = []
        self.originals: list[Tensor | None] = []
        items = list(agreed.leaves)
        trained = [p for p, item in enumerate(items) if is_batch_tensor(item) and item.requires_grad]
        if not trained:
            return
        same = own.structure.key == agreed.structure.key
        for position in trained:
            items[position] = leaf = items[position].detach().requires_grad_()
            self._leaves.append(leaf)
            self.originals.append(_matching(own.leaves[position], leaf) if same else None)
        self.batch = agreed.with_leaves(items)

    def hand_back(self, group: dist.ProcessGroup | None, *, is_shared: bool = True) -> None:
        """Gives the caller's tensors their gradients; collective over the ranks of the replica, if shared."""
        if not self._leaves:
            return
        flags = torch.tensor([float(leaf.grad is not None) for leaf in self._leaves])
        flags = flags.to(self._leaves[0].device)
        if is_shared:
            dist.all_reduce(flags, group=group)
        wanted: list[Tensor] = []
        totals: list[Tensor] = []
        for leaf, original, flag in zip(self._leaves, self.originals, flags.tolist(), strict=True):
            if not flag:
                continue
            total = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            if is_shared:
                total = total.contiguous()
                dist.all_reduce(total, group=group)
            if original is not None:
                wanted.append(original)
                totals.append(total.to(original.device))
        if wanted:  # at once: they may share a graph
            torch.autograd.backward(wanted, totals)


def _matching(item: object, leaf: Tensor) -> Tensor | None:
    """The caller's tensor, if it is one that can take the gradient of this leaf."""
    if isinstance(item, Tensor) and item.requires_grad and item.shape == leaf.shape:
        return item
    return None
