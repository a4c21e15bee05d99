"""One call of a traced step function, and what it changes in place and of a unit's state.

A tensor that is changed in place gets a new value in the graph, and so does every tensor that shares its
memory::

    last = x[:, -1]      x: v1, last: v2
    last.add_(1.0)       x: v3, last: v4      one step that changes two tensors
    y = head(x)          reads v3
"""

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.model_graph import Node
from shardwright.runtime.traced import Change, View
from shardwright.torch._private.tensors import FakeTensor, storage_key
from shardwright.torch.counting.cost_counter import CostCounter
from shardwright.torch.interception.deferred import DeferredTensor
from shardwright.torch.python_state.shared_state import Containers
from shardwright.torch.pytorch import functions
from shardwright.torch.pytorch.functions import on_fakes, unnoticed_changes
from shardwright.torch.pytorch.modules import user_line
from shardwright.torch.pytorch.tree import Structure, leaves
from shardwright.torch.tracing.trace_data import Step
from shardwright.torch.tracing.traced_values import TracedValues
from shardwright.torch.tracing.working_memory import WorkingMemory


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a call, its cost, and its side effects.

    Attributes:
        output: what it returned, with fake tensors; `Filled` where it has changed containers.
        versions: of the leaves of its arguments before it ran; None for those that are no tensors.
        attributes: tensors that a unit left in attributes of the modules inside it: (module, name, fake).
        passed_attributes: free arguments that it left there: (module, name, position among the arguments).
        written: what the unit holds and has changed: parameters, buffers, tensors in plain attributes.
        written_names: names of the parameters and buffers among these, and of those in the same memory.
        written_again: those among it that ``torch.utils.checkpoint`` changes a second time.
        own_results: positions of results that lie in memory which the unit holds and writes to in every call.
        unreached: positions of arguments that require gradients, and get none from it.
    """

    output: Any
    versions: list[int | None]
    cost: CostCounter
    attributes: Sequence[tuple[nn.Module, str, Tensor]] = ()
    passed_attributes: Sequence[tuple[nn.Module, str, int]] = ()
    written: Sequence[Tensor] = ()
    written_names: tuple[str, ...] = ()
    written_again: Sequence[Tensor] = ()
    own_results: tuple[int, ...] = ()
    unreached: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class TracedCall:
    """A call and its arguments.

    Attributes:
        arguments: (args, kwargs) with fake tensors.
    """

    func: Callable[..., Any]
    items: list[Any]
    structure: Structure
    reads: list[tuple[int, int]]
    arguments: Any
    fakes: list[Any]
    line: str

    @classmethod
    def of(
        cls,
        func: Callable[..., Any],
        items: list[Any],
        structure: Structure,
        reads: list[tuple[int, int]],
        *,
        fake: Callable[[Any], Any],
        line: str,
    ) -> "TracedCall":
        arguments = structure.rebuild([fake(item) for item in items])
        return cls(func, items, structure, reads, arguments, leaves(arguments), line)

    @property
    def inputs(self) -> tuple[int, ...]:
        """The values among its arguments, each once."""
        return tuple(dict.fromkeys(value for _, value in self.reads))

    @property
    def is_flat(self) -> bool:
        """Whether its arguments are the leaves themselves, all given by position."""
        args, kwargs = self.arguments
        same = len(args) == len(self.fakes) and all(map(operator.is_, args, self.fakes))
        return not kwargs and same

    def run(self, cost: CostCounter) -> Outcome:
        """Runs the call on fake tensors, whose mode is in force."""
        args, kwargs = self.arguments
        versions = [item._version if isinstance(item, Tensor) else None for item in self.fakes]
        containers = Containers(args, kwargs) if isinstance(self.func, nn.Module) else None
        with cost:
            output = on_fakes(self.func)(*args, **kwargs)
        if containers is not None:
            output = containers.filled(output, containers.changed)
        return Outcome(output, versions, cost)

    def detached(self, outcome: Outcome) -> tuple[int, ...]:
        """The values among its arguments that get no gradient from it, wherever they stand."""
        reached = {value for position, value in self.reads if position not in outcome.unreached}
        return tuple(value for value in self.inputs if value not in reached)

    def node(
        self,
        kind: Literal["unit", "op"],
        name: str,
        outcome: Outcome,
        *,
        cost_class: str,
        memory: WorkingMemory,
        parameters: tuple[str, ...],
        ordinal: int = 0,
        detached: tuple[int, ...] = (),
    ) -> Node:
        """Its node in the graph, but for outputs and what autograd saves."""
        return Node(
            kind=kind,
            name=name,
            ordinal=ordinal,
            inputs=self.inputs,
            outputs=(),
            parameters=parameters,
            cost_class=cost_class,
            flops=outcome.cost.flops,
            work=outcome.cost.work,
            work_bytes=memory.work_bytes,
            weight_bytes=memory.weight_bytes,
            split_work_bytes=memory.split_work_bytes,
            random=outcome.cost.random,
            detached=detached,
            line=self.line,
        )

    def changed(self, outcome: Outcome) -> list[int]:
        """Positions of the arguments that it changed in place."""
        unnoticed = unnoticed_changes(self.func, *self.arguments)
        return [
            position
            for position, (fake, version) in enumerate(zip(self.fakes, outcome.versions, strict=True))
            if version is not None and (fake._version != version or any(fake is item for item in unnoticed))
        ]


def is_opaque(item: Any) -> bool:
    """Whether a leaf is an object that a call may change, and that may have tensors inside."""
    return not isinstance(item, Tensor | type(None) | bool | int | float | str | bytes | complex)


_Place = tuple[dict[str, Any], str, bool]  # where it is, its name, whether it is a parameter or buffer


class UnitState:
    """The tensors that a unit holds before a call."""

    def __init__(self, unit: nn.Module, twin: nn.Module | None = None):
        self._own = [tensor for _, tensor in _entries(unit)]
        # With their memory: `tensor.data = other` gives a tensor another one.
        self._before = [(*entry, storage_key(entry[1])) for entry in _entries(twin or unit)]

    @property
    def plain(self) -> list[Tensor]:
        """The unit's tensors in plain attributes that were there before the trace."""
        return [tensor for tensor in self._own if type(tensor) is Tensor]

    def with_writes(self, outcome: Outcome, results: Sequence[Any]) -> Outcome:
        """Adds to the outcome of a call what it has changed of the unit."""
        cost = outcome.cost
        return replace(
            outcome,
            written=self._changed(cost.written),
            written_again=self._in_memory(cost.written_again),
            own_results=self._own_results(results, cost),
        )

    def _changed(self, written: Collection[int]) -> list[Tensor]:
        """The unit's tensors that the call has written to, the parameters and buffers that it replaced."""
        return [
            own
            for own, ((registry, key, registered), before, memory) in zip(
                self._own, self._before, strict=True
            )
            if memory in written
            or storage_key(before) != memory
            or (registered and registry.get(key) is not before)
        ]

    def _in_memory(self, memories: Collection[int]) -> list[Tensor]:
        pairs = zip(self._own, self._before, strict=True)
        return [own for own, (_, _, memory) in pairs if memory in memories]

    def _own_results(self, results: Sequence[Any], cost: CostCounter) -> tuple[int, ...]:
        """Positions of the results that lie in memory which the unit holds, and writes to in every call."""
        own = {memory for _, _, memory in self._before if memory in cost.written}
        if not own:
            return ()
        memories = (storage_key(item) if isinstance(item, Tensor) else None for item in results)
        return tuple(
            p
            for p, memory in enumerate(memories)
            if memory is not None and cost.views.get(memory, memory) in own
        )


def _entries(module: nn.Module) -> Iterator[tuple[_Place, Tensor]]:
    for sub in module.modules():
        registries: tuple[dict[str, Any], ...] = (sub._parameters, sub._buffers, vars(sub))
        for registry in registries:
            for key, tensor in registry.items():
                if isinstance(tensor, Tensor):
                    yield (registry, key, registry is not vars(sub)), tensor


def view_of(tensor: Tensor) -> View:
    return View(
        memory=storage_key(tensor),
        size=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        offset=int(tensor.storage_offset()),
        dtype=tensor.dtype,
    )


def follow_changes(steps: Sequence[Step], results: Iterable[int]) -> None:
    """Drops changes that nobody reads, and finds for the others what they are views of."""
    live = set(results)
    for step in reversed(steps):
        if step.changes:
            kept = tuple(c for c in step.changes if c.position is not None or c.after in live)
            step.bases = _bases(kept, step.changes)
            step.changes = kept
            live.update(c.before for c in (*kept, *step.bases) if c.before is not None)
        live.update(value for _, value in step.reads)


def _bases(kept: Sequence[Change], every: Sequence[Change]) -> tuple[Change, ...]:
    found = []
    for memory in dict.fromkeys(change.view.memory for change in kept):
        views = [change.view for change in kept if change.view.memory == memory]
        if len(views) == 1:
            continue
        known = [c for c in (*kept, *every) if c.view.memory == memory and c.before is not None]
        base = next((c for c in known if all(c.view.covers(view) for view in views)), None)
        if base is not None:
            found.append(base)
    return tuple(found)


class TracedChanges:
    """Follows changes in place."""

    def __init__(self, values: TracedValues, was_there: Callable[[Tensor], bool]):
        self._values = values
        self._was_there = was_there
        self._changers: dict[int, list[Step]] = {}
        self._fake_memory: dict[int, int] = {}  # of tensors that every rank had: real memory -> their fake's

    def of_call(self, node: int, call: TracedCall, outcome: Outcome) -> tuple[Change, ...]:
        """The changes of a call that has run; every tensor that shares their memory gets a new value."""
        values = self._values
        changed = call.changed(outcome)
        changes: list[Change] = []
        memories = {storage_key(call.fakes[position]) for position in changed}
        done: set[int] = set()
        for position in changed:
            item, fake = call.items[position], call.fakes[position]
            if isinstance(item, nn.Parameter) or id(item) in values.lent_for or id(item) in done:
                continue
            done.add(id(item))
            before = values.find(item)
            if tuple(item.shape) != tuple(fake.shape):
                raise UsageError(
                    f"{user_line()}: {functions.name_of(call.func)}() changes the shape of a tensor in place "
                    f"from {tuple(item.shape)} to {tuple(fake.shape)}, which other ranks cannot follow. Give "
                    "the result a name instead: x = x.unsqueeze(0), not x.unsqueeze_(0). A buffer that gets "
                    "its size there belongs into the forward of a module of its own, which is then one unit."
                )
            if before is None:
                self._fake_memory[storage_key(item)] = storage_key(fake)
            after = values.new(node, -1, fake, holder=item)
            lasting = before is None and self._was_there(item)
            changes.append(Change(position, before, after, view_of(fake), lasting))
        for value in sorted(value for memory in memories for value in values.in_memory(memory)):
            alias = values[value]
            if values.find(alias.holder) == value and id(alias.holder) not in done:
                done.add(id(alias.holder))
                after = values.new(node, -1, alias.fake, holder=alias.holder)
                changes.append(Change(None, value, after, view_of(alias.fake)))
        return tuple(changes)

    def parameters(self, call: TracedCall, outcome: Outcome) -> tuple[str, ...]:
        changed = [storage_key(call.fakes[position]) for position in call.changed(outcome)]
        return self._values.lent_in(changed) if changed else ()

    def note(self, step: Step) -> None:
        for memory in {change.view.memory for change in step.changes}:
            self._changers.setdefault(memory, []).append(step)

    def in_memory_of(self, item: Tensor) -> bool:
        """Whether a step has changed the memory of a tensor that every rank had."""
        return item.layout is torch.strided and storage_key(item) in self._fake_memory

    def under_another_name(self, item: Tensor) -> int | None:
        """The value of a tensor that every rank had, until a step changed it through another name."""
        if not self._fake_memory or isinstance(item, DeferredTensor | FakeTensor | nn.Parameter):
            return None
        if item.layout is not torch.strided or storage_key(item) not in self._fake_memory:
            return None
        value, fake = None, self._values.as_fake(item)
        for step in self._changers[self._fake_memory[storage_key(item)]]:
            assert step.node is not None
            after = self._values.new(step.node, -1, fake, holder=item)
            step.changes = (*step.changes, Change(None, value, after, view_of(fake)))
            value = after
        return value
