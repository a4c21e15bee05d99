"""Finds the nodes of a trace that one stage must compute; buffers that code between units changes.

In a plain loop each microbatch finds what the one before left. Over stages that holds on one stage only, as
each stage takes the microbatches in order. So such a buffer gets a home: it is read and changed there, and
later stages are sent what they read::

    self.mean.mul_(0.9).add_(x.mean(0).detach(), alpha=0.1)     on the stage that makes x
    y = x - self.mean                                           here or on a later stage

After the batch the home's content goes to the other ranks, so all agree between steps.

====================================== ============================================================
`torch.utils.checkpoint` over units    a stage recomputes only what it computed
a buffer that glue changes             whoever reads it waits for the change of the microbatch before
`torch.autograd.grad` in glue          autograd knows no path from one stage to another
a parameter changed between units      other stages would not see the change
a counter that Python reads            other microbatches come in where a rank changes its stage
====================================== ============================================================

A node may appear in several groups. The planner cuts between groups only.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.model_graph import Node, Together
from shardwright.torch._private.tensors import storage_key
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.tracing.trace_data import Step
from shardwright.torch.tracing.traced_values import TracedValues

_Place = tuple[nn.Module, str]
_FLAG = 64  # elements of a buffer whose content is compared, because `.data.fill_()` leaves no other mark


class BufferWatch:
    """Finds out which buffers outside of units a traced step function changes."""

    def __init__(self, unit_map: UnitMap):
        in_units = {id(sub) for unit in unit_map.modules.values() for sub in unit.modules()}
        self.places: dict[str, list[_Place]] = {}
        self._before: dict[str, tuple[Tensor, int]] = {}
        self._flags: dict[str, Tensor] = {}
        for module in unit_map.model.modules():
            for key, buffer in module._buffers.items():
                if buffer is None or buffer.is_meta or id(module) in in_units:
                    continue
                name = unit_map.parameters[id(buffer)]
                self.places.setdefault(name, []).append((module, key))
                self._before[name] = (buffer, buffer._version)
                if buffer.numel() <= _FLAG:
                    self._flags[name] = buffer.detach().clone()

    def tensors(self) -> dict[str, Tensor]:
        """Buffers by first name."""
        return {name: buffer for name, (buffer, _) in self._before.items()}

    def last(self, name: str) -> Tensor | None:
        """The tensor to which a buffer's name refers now."""
        module, key = self.places[name][0]
        return module._buffers.get(key)

    def changed(
        self, has_value: Callable[[Any], bool], *, under_another_name: Callable[[Tensor], bool]
    ) -> dict[str, bool]:
        """Names of changed buffers, and whether what comes from units went into them."""
        found = {}
        for name, (buffer, version) in self._before.items():
            from_units = has_value(buffer) or has_value(self.last(name)) or under_another_name(buffer)
            if (
                from_units
                or self.last(name) is not buffer
                or buffer._version != version
                or self._is_switched(name, buffer)
            ):
                found[name] = from_units
        return found

    def _is_switched(self, name: str, buffer: Tensor) -> bool:
        before = self._flags.get(name)
        return before is not None and not torch.allclose(before, buffer, rtol=0.0, atol=0.0, equal_nan=True)

    def replaced(self, is_value: Callable[[Any], bool]) -> dict[str, str]:
        """Names of buffers whose place has a value of the graph now; of another shape, with both shapes."""
        found = {}
        for name, (buffer, _) in self._before.items():
            last = self.last(name)
            if last is not buffer and last is not None and is_value(last):
                same = last.shape == buffer.shape and last.dtype == buffer.dtype
                found[name] = "" if same else f"{_described(buffer)} to {_described(last)}"
        return found


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} and {tensor.dtype}"


class GlueBuffers:
    """Changed buffers of a placed model."""

    def __init__(self, model: nn.Module, ranks: Mapping[str, int]):
        self._ranks = ranks
        self._places: dict[str, list[_Place]] = {name: [] for name in ranks}
        self._own: dict[str, Tensor] = {}
        names: dict[int, str] = {}
        for prefix, module in model.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is None:
                    continue
                name = names.setdefault(id(buffer), f"{prefix}.{key}" if prefix else key)
                if name in self._places:
                    self._places[name].append((module, key))
                    self._own[name] = buffer

    def now(self, name: str) -> Tensor:
        """The present content of a buffer, on the rank of its home."""
        module, key = self._places[name][0]
        buffer = module._buffers[key]
        assert buffer is not None
        return buffer

    def agree(self, pipeline_rank: int, ranks: tuple[int, ...], group: dist.ProcessGroup) -> None:
        """Gives every rank what the home has; collective over the replica."""
        with torch.no_grad():
            for name, owner in self._ranks.items():
                own = self._own[name]
                if owner == pipeline_rank:
                    own.copy_(self.now(name))
                for module, key in self._places[name]:
                    module._buffers[key] = own
                payload = own.contiguous()
                if payload.numel():
                    dist.broadcast(payload, ranks[owner], group=group)
                if payload is not own:
                    own.copy_(payload)


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
