"""Finds what a traced call changes in place, and gives every name of it a new value.

A tensor that is changed in place gets a new value in the graph, and so does every tensor that shares its
memory::

    last = x[:, -1]      x: v1, last: v2
    last.add_(1.0)       x: v3, last: v4      one step that changes two tensors
    y = head(x)          reads v3
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.runtime.traced import Change, View
from shardwright.torch._private import FakeTensor, storage_key
from shardwright.torch.interception.deferred import DeferredTensor
from shardwright.torch.pytorch import functions
from shardwright.torch.pytorch.source_line import user_line
from shardwright.torch.tracing.recorded_step import Step
from shardwright.torch.tracing.traced_call import Outcome, TracedCall
from shardwright.torch.tracing.traced_values import TracedValues


def view_of(tensor: Tensor) -> View:
    """The place of a tensor in memory."""
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
        """Names of the parameters that a call changed in place."""
        changed = [storage_key(call.fakes[position]) for position in call.changed(outcome)]
        return self._values.lent_in(changed) if changed else ()

    def note(self, step: Step) -> None:
        """Records the memory that a step changes."""
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
