"""Finds the arguments of a call that get a gradient; a unit may detach its inputs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["base_nodes", "gradient_nodes", "unreached"]

Nodes = Mapping[int, torch.autograd.graph.Node]


def gradient_nodes(items: Sequence[Any]) -> Nodes:
    """The autograd nodes that take gradients of tensors, by position; of those that require gradients.

    A view that was made under no_grad says so when its base does, and gets none.
    """
    with torch.enable_grad():
        return {
            position: torch.autograd.graph.get_gradient_edge(item).node
            for position, item in enumerate(items)
            if isinstance(item, Tensor) and item.requires_grad
            if not (item._is_view() and item.grad_fn is None)
        }


def base_nodes(items: Sequence[Any]) -> Nodes:
    """The autograd nodes that take gradients of the bases of these views, by position.

    A view that is changed in place is made anew of its base: what it was before is no longer on the way.
    """
    bases = [item._base if isinstance(item, Tensor) else None for item in items]
    return gradient_nodes(bases)


def unreached(arguments: Nodes, results: Iterable[Any], bases: Nodes | None = None) -> frozenset[int]:
    """Positions of the arguments that require gradients, and get none from any of the results.

    >>> x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    >>> unreached(gradient_nodes([x, y]), [x * 2 + y.detach()])
    frozenset({1})
    """
    if not arguments:
        return frozenset()
    changed = bases or {}
    own, given = list(gradient_nodes(list(results)).values()), {*arguments.values(), *changed.values()}
    behind: list[torch.autograd.graph.Node] = []
    seen: set[torch.autograd.graph.Node] = set()
    for pending in (own, behind):
        # What lies behind an argument was there before the call: all of the model, which is seldom needed.
        while pending and not (pending is behind and seen.issuperset(arguments.values())):
            node = pending.pop()
            if node not in seen:
                seen.add(node)
                further = behind if node in given else pending
                further += [following for following, _ in node.next_functions if following is not None]
    return frozenset(
        position
        for position, node in arguments.items()
        if node not in seen and not (position in changed and changed[position] in seen)
    )
