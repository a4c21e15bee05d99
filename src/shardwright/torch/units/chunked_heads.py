"""What a head and its loss keep and take where logits are computed piece by piece (`loss_chunks`).

A trace has them as the script calls them: a head, operations, a loss. Each would be counted with logits that
stand in memory whole. Here all of it is counted, and timed, as the call of the head; the others are free.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.model_graph import Node
from shardwright.torch._private.tensors import fake_mode_is_active, new_fake_mode
from shardwright.torch.backward.waiting_heads import heads_may_wait, mark_heads, wait_like, waiting_head
from shardwright.torch.counting.compiled_modules import HookEffects
from shardwright.torch.counting.cost_counter import CostCounter
from shardwright.torch.counting.stand_in_data import random_like
from shardwright.torch.pytorch.tensors import autocast_as
from shardwright.torch.tracing.divided_tail import DividedTail, TailRun, divided_tails
from shardwright.torch.tracing.trace_data import Sample, Trace
from shardwright.torch.tracing.working_memory import working_memory


class HeadAndLoss(nn.Module):
    """A head, and what the script does with its logits."""

    def __init__(self, head: nn.Linear, run: TailRun):
        super().__init__()
        self.head = head
        self._run = _Shared(run)

    def forward(self, *args: Any, **kwargs: Any) -> Sequence[Tensor]:
        with heads_may_wait(on_fakes=fake_mode_is_active()):
            return self._run.tail(self.head(*args, **kwargs))


class _Shared:
    """A copy of the module runs the same operations: the trace is not copied."""

    def __init__(self, tail: Callable[[Any], Sequence[Tensor]]):
        self.tail = tail

    def __deepcopy__(self, memo: Any) -> "_Shared":
        return self


def with_chunked_heads(model: nn.Module, trace: Trace, chunks: int | str) -> Trace:
    """The trace, with the costs that its heads and losses have by this setting."""
    if trace.backward_at is None or not mark_heads(model, chunks):
        return trace
    nodes, values, samples = list(trace.graph.nodes), list(trace.graph.values), dict(trace.samples)
    for at, tail in divided_tails(trace).items():
        sample = samples[nodes[at].cost_class]
        head = _head_of(model, nodes[at], sample)
        if head is None or tail.returned:
            continue
        key = f"{nodes[at].cost_class}-{chunks}-{'-'.join(nodes[each].cost_class for each in tail.nodes)}"
        own = HeadAndLoss(head, TailRun(tail, trace, partial(random_like, device=head.weight.device)))
        samples[key] = replace(sample, func=own)
        nodes[at] = replace(_counted(head, nodes[at], tail, trace, sample), cost_class=key)
        for each in tail.nodes:
            nodes[each] = _free(nodes[each], samples)
        for each in tail.values:
            values[each] = replace(values[each], spec=replace(values[each].spec, num_bytes=0))
    graph = replace(trace.graph, nodes=tuple(nodes), values=tuple(values))
    return replace(trace, graph=graph, samples=samples)


def _head_of(model: nn.Module, node: Node, sample: Sample) -> nn.Linear | None:
    """The head that a node calls, if it leaves its logits to the loss."""
    given = [item for item in sample.leaves if isinstance(item, Tensor)]
    if len(given) != 1 or not given[0].dim():
        return None
    return waiting_head(model.get_submodule(node.name), given[0].numel() // max(given[0].shape[-1], 1))


def _free(node: Node, samples: dict[str, Sample]) -> Node:
    """A node that takes nothing: what it does is counted elsewhere."""
    key = f"{node.cost_class}-pending"
    samples[key] = replace(samples[node.cost_class], func=_nothing)
    return replace(
        node,
        cost_class=key,
        flops=0,
        work=None,
        saved_bytes=0,
        saved_values=(),
        work_bytes=0,
        weight_bytes=0,
        split_work_bytes=0,
    )


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Takes the place of operations that are done elsewhere."""


def _counted(head: nn.Linear, node: Node, tail: DividedTail, trace: Trace, sample: Sample) -> Node:
    """The node of a head, with what it keeps and takes together with its loss."""
    mode = new_fake_mode()
    # A plan that is made without running the model has its parameters on the meta device.
    device = next(item.device for item in sample.leaves if isinstance(item, Tensor))

    def fake(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        made = torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=item.device)
        return made.requires_grad_(item.requires_grad)

    with mode, autocast_as(sample.autocast), torch.enable_grad():
        own = nn.Linear(
            head.in_features,
            head.out_features,
            bias=head.bias is not None,
            device=device,
            dtype=head.weight.dtype,
        )
        for name, parameter in own.named_parameters():
            parameter.requires_grad_(head.get_parameter(name).requires_grad)
        wait_like(own, head)
        both = HeadAndLoss(own, TailRun(tail, trace, fake))
        names = {id(parameter): name for name, parameter in own.named_parameters()}
        items = [fake(item) for item in sample.leaves]
        args, kwargs = sample.structure.rebuild(items)
        with CostCounter(names) as cost:
            made = both(*args, **kwargs)
        del made
        memory = working_memory(
            both, items, sample.structure, given=[False] * len(items), hooks=HookEffects()
        )
    return replace(
        node,
        saved_bytes=cost.saved_bytes,
        saved_values=(),
        work_bytes=memory.work_bytes,
        weight_bytes=0,
        split_work_bytes=memory.work_bytes,
    )
