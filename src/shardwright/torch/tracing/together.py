"""Finds the nodes and buffers of a trace that one stage must compute, whatever the plan.

====================================== ============================================================
`torch.utils.checkpoint` over units    a stage recomputes only what it computed
a buffer that glue changes             whoever reads it waits for the change of the microbatch before
`torch.autograd.grad` in glue          autograd knows no path from one stage to another
a parameter changed between units      other stages would not see the change
a counter that Python reads            other microbatches come in where a rank changes its stage
====================================== ============================================================

A node may appear in several groups. The planner cuts between groups only.
"""

from collections.abc import Collection, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from shardwright.model_graph import Node, Together
from shardwright.torch._private import storage_key
from shardwright.torch.tracing.glue_buffers import BufferWatch
from shardwright.torch.tracing.recorded_step import Step
from shardwright.torch.tracing.traced_values import TracedValues


class Regions:
    """Calls of `torch.utils.checkpoint`, and the nodes inside them."""

    def __init__(self) -> None:
        self._nodes: dict[FrameType, list[int]] = {}
        self._lines: dict[FrameType, str] = {}
        self._with_gradients: set[FrameType] = set()

    def note(self, node: int, frame: FrameType, line: str) -> None:
        """Records a node inside a call."""
        self._nodes.setdefault(frame, []).append(node)
        self._lines.setdefault(frame, line)
        if torch.is_grad_enabled():
            self._with_gradients.add(frame)

    def together(self, *, trains: bool) -> list[Together]:
        """The nodes of each call."""
        return [
            Together(
                tuple(nodes),
                what="torch.utils.checkpoint",
                line=self._lines[frame],
                why="torch.utils.checkpoint is called on code that is placed on several stages, and a stage "
                "can recompute only its own.",
                remedy="Call it on each block by itself, or move the code into one module.",
                for_backward=True,
            )
            for frame, nodes in self._nodes.items()
            if not trains or frame in self._with_gradients
        ]

    def clear(self) -> None:
        """Forgets all calls: their frames hold on to all that their functions had."""
        self._nodes.clear()
        self._lines.clear()
        self._with_gradients.clear()


def buffer_together(name: str, nodes: Sequence[Node], readers: set[int], writers: set[int]) -> Together:
    """Groups the readers of a buffer's content at the start of a microbatch with its writers."""
    return Together(
        tuple(sorted(readers | writers)),
        what=f"the buffer {name}, which is changed",
        line=nodes[max(writers, default=max(readers, default=0))].line,
        why=f"the buffer {name} is read on an earlier stage than the one that changes it. The next "
        "microbatch would have to wait for the change, and no stage could work ahead.",
        remedy="Read and change it in one module, or change it where it is read.",
    )


def gradient_together(
    nodes: Sequence[Node], node: int, producers: Mapping[int, int], trained: Collection[int], *, deep: bool
) -> Together:
    """Groups a call of `torch.autograd.grad` with the nodes that it goes back to."""
    found = {node, *(producers[value] for value in nodes[node].inputs)}
    pending = list(found) if deep else []
    while pending:
        before = {producers[value] for value in nodes[pending.pop()].inputs if value in trained} - found
        found |= before
        pending += before
    return Together(
        tuple(sorted(found)),
        what="torch.autograd.grad()",
        line=nodes[node].line,
        why="torch.autograd.grad() asks for a gradient with respect to a tensor of another stage.",
        remedy="Call it right behind the modules that it goes back through, before any other module is "
        "called, and place these on one rank: sw.set_partition(module, rank), or take a step that calls it "
        "first, so that the planner places them so.",
    )


def parameters_together(
    steps: Sequence[Step], nodes: Sequence[Node], held: Mapping[str, Collection[str]]
) -> list[Together]:
    """Groups the changes of parameters, and of units' buffers, with all their users."""
    changed = {name: step.line for step in steps for name in step.changed_parameters}
    found = []
    for name, line in changed.items():
        users = {
            index
            for index, node in enumerate(nodes)
            if name in node.parameters or (node.kind == "unit" and name in held[node.name])
        }
        users |= {step.node for step in steps if step.node is not None and name in step.changed_parameters}
        if len({nodes[user].name if nodes[user].kind == "unit" else user for user in users}) == 1:
            continue  # a unit changes what it alone has
        found.append(
            Together(
                tuple(sorted(users)),
                what=f"the parameter or buffer {name}, which is changed in place",
                line=line,
                why=f"the parameter or buffer {name} is changed in place by the step function or by a "
                "module, and several stages use it.",
                remedy="Change it after optimizer.step(), or inside the one module that uses it.",
            )
        )
    return found


def counters_together(steps: Sequence[Step], nodes: Sequence[Node]) -> list[Together]:
    """Groups the nodes between the first and the last use of a buffer that Python reads."""
    found = []
    for name in dict.fromkeys(name for step in steps for name in step.counters):
        used = [index for index, step in enumerate(steps) if name in step.counters]
        # From the node before on: which stage a rank has got to shows there.
        before = [step.node for step in steps[: used[0]] if step.node is not None][-1:]
        between = [step.node for step in steps[used[0] : used[-1]] if step.node is not None]
        found.append(
            Together(
                tuple(dict.fromkeys([*before, *between])),
                what=f"the buffer {name}, whose value Python reads",
                line=nodes[between[-1]].line if between else "",
                why=f"the buffer {name} is changed in the step function, Python reads its value, and stages "
                "change in between, where other microbatches come in.",
                remedy="Read and change it in one place.",
                one_rank=True,
            )
        )
    return found


class TracedBuffers:
    """Changed buffers: values of the graph, or counters that every rank keeps for itself.

    Attributes:
        initial: value -> name of the buffer of which it is the content at the start.
    """

    def __init__(
        self,
        values: TracedValues,
        buffers: Mapping[str, Tensor],
        state: Collection[str],
        counters: Collection[str],
    ):
        self.initial: dict[int, str] = {}
        self._values = values
        self._state = {id(buffer): name for name, buffer in buffers.items() if name in state}
        self._counters = {storage_key(buffer): name for name, buffer in buffers.items() if name in counters}

    def first_read(self, item: Tensor, node: int) -> int | None:
        """The content of a buffer at the start; None for another tensor."""
        name = self._state.get(id(item))
        if name is None:
            return None
        value = self._values.new(node, -1, self._values.as_fake(item), holder=item)
        self.initial[value] = name
        return value

    def counters_among(self, items: Sequence[Any]) -> tuple[str, ...]:
        """Names of the counters among the leaves of arguments."""
        if not self._counters:
            return ()
        real = [item for item in items if type(item) is Tensor and item.layout is torch.strided]
        found = (self._counters.get(storage_key(item)) for item in real)
        return tuple(dict.fromkeys(name for name in found if name is not None))

    def together(self, steps: Sequence[Step], nodes: Sequence[Node], watch: BufferWatch) -> list[Together]:
        """Nodes that read and change one buffer."""
        found = []
        for value, name in self.initial.items():
            memory = self._values.memory_of(value)
            readers = {s.node for s in steps if s.node is not None and value in s.inputs}
            writers = {
                s.node
                for s in steps
                if s.node is not None and any(c.view.memory == memory for c in s.changes)
            }
            last = self._values.find(watch.last(name))
            if last is not None and last != value:
                writers.add(self._values[last].producer)
            found.append(buffer_together(name, nodes, readers, writers))
        return found
