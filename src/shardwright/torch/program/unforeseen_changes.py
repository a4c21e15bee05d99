"""Changes in place that a unit makes in one microbatch, and did not make in the trace.

A unit that looks at values may change what it is given or leave it (``if x.mean() > 1: x.clamp_(-1, 1)``).
Where the trace has no change, other stages go on with the tensor as it was.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import TraceMismatchError
from shardwright.torch.pytorch.functions import name_of_call
from shardwright.torch.pytorch.tree import flatten
from shardwright.torch.tracing.trace_data import Step, Trace

__all__ = ["may_change", "refusing_changes"]


def may_change(
    trace: Trace, step: Step, homes: Sequence[int], home_of: Sequence[int]
) -> frozenset[int] | None:
    """Positions of the arguments that a unit may change, as nobody would miss it.

    None where there is nothing to watch: it is no unit, or does not look at values.

    Args:
        trace: the trace.
        step: one of its steps.
        homes: stage of each node.
        home_of: stage of each value.
    """
    if step.node is None or not step.looks_at_values or not isinstance(step.func, nn.Module):
        return None
    stage, nodes = homes[step.node], trace.graph.nodes
    found = {change.position for change in step.changes if change.position is not None}
    elsewhere = [
        (node, trace.memory[value])
        for node, home in enumerate(homes)
        if home != stage
        for value in nodes[node].inputs
    ]
    returned = {trace.memory[value] for value in trace.graph.outputs}
    for position, value in step.reads:
        memory = trace.memory[value]
        readers = [node for node, other in elsewhere if other == memory]
        if home_of[value] == stage:  # it is sent when the stage ends: with the change
            fine = all(node > step.node for node in readers)
        else:
            fine = all(node < step.node for node in readers) and memory not in returned
        if fine:
            found.add(position)
    return frozenset(found)


def refusing_changes(
    call: Callable[..., Any], unit: nn.Module, allowed: frozenset[int], *, line: str, microbatch: int
) -> Callable[..., Any]:
    """Has a call of a unit raise where it changes other arguments than those allowed.

    Args:
        call: calls the unit.
        unit: the unit.
        allowed: from `may_change`.
        line: where it is called.
        microbatch: which one.
    """

    def refusal() -> TraceMismatchError:
        return TraceMismatchError(
            f"{line}: {name_of_call(unit)} changes an argument in place in microbatch {microbatch}, but not "
            "in the trace, so other stages would go on with the tensor as it was. Change a copy inside the "
            "module (x = x.clone()), or choose by torch.where, and return it."
        )

    def watched(*args: Any, **kwargs: Any) -> Any:
        tensors = [
            (item, item._version)
            for position, item in enumerate(flatten((args, kwargs))[0])
            if isinstance(item, Tensor) and position not in allowed and not item.is_inference()
        ]
        try:
            result = call(*args, **kwargs)
        except RuntimeError as error:
            # Autograd refuses it by itself for a tensor of another stage, which is a leaf here.
            if torch.is_grad_enabled() and "leaf Variable that requires grad" in str(error):
                raise refusal() from error
            raise
        if any(item._version != version for item, version in tensors):
            raise refusal()
        return result

    return watched
