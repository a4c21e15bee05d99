"""Graphs and plans a model of any size without running it.

On accelerators PyTorch fuses attention with its dropout, and dropout is one kernel with a mask of a byte per
element. A CPU trace would see scores that no accelerator writes, and masks four times as large: Hugging
Face's GPT-2 took twice the memory.
"""

import copy
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwright.errors import PlanError, UsageError
from shardwright.model_graph import ModelGraph
from shardwright.torch.attention.kernels import traced_for_accelerators
from shardwright.torch.batch.batch import Arguments, Batch
from shardwright.torch.interception.glue import active_handler, plain_torch
from shardwright.torch.pytorch.tree import flatten, leaves
from shardwright.torch.units.model_traces import trace_parts

_DROPOUT = 4  # its position among the arguments of attention


class OnAccelerators(TorchFunctionMode):
    """While it is active, operations that differ there are traced as accelerators compute them."""

    def __init__(self) -> None:
        super().__init__()
        self._attention = ExitStack()

    def __enter__(self) -> Self:
        self._attention.enter_context(traced_for_accelerators())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        self._attention.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:  # its dropout costs nothing where it is fused
            args = (*args[:_DROPOUT], 0.0, *args[_DROPOUT + 1 :]) if len(args) > _DROPOUT else args
            kwargs = {name: value for name, value in kwargs.items() if name != "dropout_p"}
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if inplace:
        return F.dropout(input, p, training, inplace=True)
    return torch.native_dropout(input, p, training)[0]


def trace_model(
    model: nn.Module,
    *args: Any,
    loss: Callable[[Any], Tensor] | None = None,
    num_stages: int = 2,
    device: torch.device | str = "cpu",
    on_accelerators: bool = False,
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
        on_accelerators: count operations as accelerators compute them, not as CPUs do.
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
    with OnAccelerators() if on_accelerators else nullcontext():
        return graph_of(model, (args, kwargs), loss=loss, num_stages=num_stages, device=torch.device(device))


def graph_of(
    model: nn.Module,
    arguments: Arguments,
    *,
    loss: Callable[[Any], Tensor] | None,
    num_stages: int,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
) -> ModelGraph:
    """Traces as `trace_model` does, and tells how far it is: see `trace_parts`."""
    batch = Batch(with_data(arguments, device))
    step = step_of(model, loss)
    traces = trace_parts(model, step, {1: batch}, device=device, num_stages=num_stages, progress=progress)
    return traces[1].graph


def in_precision(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a model as it trains in 16 bits; its parameters have no data, and take no memory."""
    without_data: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, without_data).to(dtype)


def step_of(model: nn.Module, loss: Callable[[Any], Tensor] | None) -> Callable[..., Tensor]:
    """A training step: the model, the loss, the backward."""

    def step(*args: Any, **kwargs: Any) -> Tensor:
        value = loss_of(model(*args, **kwargs), loss)
        handler = active_handler()
        if handler is not None and value.requires_grad:
            with plain_torch():
                handler.backward(value, None)
        return value

    return step


def loss_of(output: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    if loss is not None:
        return loss(output)
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    for leaf in leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf.mean()
    raise UsageError(
        f"the model returns {type(output).__name__} without a tensor of floating-point numbers, so there is "
        "no loss to train it with. Give a function loss that makes one number of what the model returns."
    )


def with_samples(arguments: Arguments, number: int) -> Arguments:
    """A batch of so many samples: those that there are, again and again."""
    size = Batch(with_data(arguments, "cpu")).num_samples
    if size is None:
        raise PlanError("the batch holds no tensor that can be cut into microbatches.")
    again = torch.arange(number) % size

    def of_number(item: Any) -> Any:
        is_cut = isinstance(item, Tensor) and item.dim() > 0 and item.shape[0] == size
        return item[again.to(item.device)] if is_cut else item

    items, structure = flatten(arguments)
    args, kwargs = structure.rebuild([of_number(item) for item in items])
    return args, kwargs


def with_data(arguments: Arguments, device: torch.device | str) -> Arguments:
    """Arguments with data: operations between units look at values, so zeros stand for meta tensors."""
    items, structure = flatten(arguments)
    args, kwargs = structure.rebuild([_tensor_with_data(item, device) for item in items])
    return args, kwargs


def _tensor_with_data(item: Any, device: torch.device | str) -> Any:
    if isinstance(item, Tensor) and item.is_meta:
        return torch.zeros(item.shape, dtype=item.dtype, device=device)
    return item
