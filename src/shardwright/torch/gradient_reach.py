"""Which arguments of a call get a gradient from its results: a unit may detach what it is given."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["unreached"]


def unreached(arguments: Sequence[Any], results: Iterable[Any]) -> frozenset[int]:
    """Positions of the arguments that require gradients, and get none from any of the results.

    >>> x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    >>> unreached([x, y], [x * 2 + y.detach()])
    frozenset({1})
    """
    edge = torch.autograd.graph.get_gradient_edge
    with torch.enable_grad():
        nodes = {
            position: edge(item).node
            for position, item in enumerate(arguments)
            if isinstance(item, Tensor) and item.requires_grad
        }
        pending = [edge(item).node for item in results if isinstance(item, Tensor) and item.requires_grad]
    if not nodes:
        return frozenset()
    wanted, seen = set(nodes.values()), set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        # What lies behind an argument was there before the call.
        pending += [following for following, _ in node.next_functions if following is not None]
    return frozenset(position for position, node in nodes.items() if node not in wanted & seen)
