"""The graph of a model without running it: no weights, no ranks, any size."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.model_graph import ModelGraph
from shardwright.torch.batch import Splitter
from shardwright.torch.discover import discover
from shardwright.torch.glue import active_handler, intercept_calls, plain_torch, restore_calls
from shardwright.torch.trace import trace_step
from shardwright.torch.tree import leaves
from shardwright.torch.unit_map import UnitMap
from shardwright.torch.units import choose_units

__all__ = ["trace_model"]


def trace_model(
    model: nn.Module,
    *args: Any,
    loss: Callable[[Any], Tensor] | None = None,
    num_stages: int = 2,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> ModelGraph:
    """Traces one training microbatch of a model on tensors without data.

    Nothing is computed and no memory is taken, so a model of any size can be given, built under
    ``torch.device("meta")``.

    Args:
        model: any module.
        *args: what it is called with; tensors may be on the meta device.
        loss: makes one number of what the model returns; without it, its attribute ``loss``, or the mean of
            its first tensor.
        num_stages: how many stages are thought of, which says how fine the units need to be.
        device: where the units are thought to compute.
        **kwargs: what it is called with.

    Returns:
        The units, what flows between them, and what each costs.

    Raises:
        TraceError: the model cannot be traced; the line is named.

    Example:
        >>> import torch, shardwright.torch as sw
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(8, 99), torch.nn.ReLU(), torch.nn.Linear(99, 1))
        >>> graph = sw.trace_model(model, torch.empty(2, 8))
        >>> [graph.nodes[call].name for call in graph.calls]
        ['0', '2']
    """

    def step(*args: Any, **kwargs: Any) -> Tensor:
        value = _loss_of(model(*args, **kwargs), loss)
        handler = active_handler()
        if handler is not None and value.requires_grad:
            with plain_torch():
                handler.backward(value, None)
        return value

    arguments = (
        tuple(_placed(arg, device) for arg in args),
        {k: _placed(v, device) for k, v in kwargs.items()},
    )
    place = torch.device(device)
    costs = discover(model, step, arguments, device=place)
    unit_map = UnitMap.of(model, choose_units(model, costs, num_stages=num_stages))
    for module in unit_map.modules.values():
        intercept_calls(module)
    try:
        batch_size = Splitter().batch_size(arguments) or 1
        return trace_step(unit_map, step, arguments, device=place, batch_size=batch_size).graph
    finally:
        for module in unit_map.modules.values():
            restore_calls(module)


def _loss_of(output: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    if loss is not None:
        return loss(output)
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    first = next(leaf for leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return first.mean()


def _placed(value: Any, device: torch.device | str) -> Any:
    """An argument with data: operations between units look at values, so zeros stand for meta tensors."""
    if isinstance(value, Tensor) and value.is_meta:
        return torch.zeros(value.shape, dtype=value.dtype, device=device)
    return value
