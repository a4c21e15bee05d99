"""Finds each step's input tensors on its rank, and the results that the rank must keep.

A step gets most tensors from the user's own variables. Two kinds cannot come from there:

- a tensor that another stage made: received, or taken from another stage of this rank (a *cut*);
- a tensor that another stage than its maker changed in place. That stage changes a copy, so the user's
  variable still refers to the tensor before the change, or to a stand-in::

      stage 0:  total = zeros_like(x)     the variable `total`
      stage 1:  total[:, 1] = y           a copy of it is changed
                z = total.sum()           must read the copy

  Such values are *displaced*: the microbatch keeps the tensor, and gives it to every step that reads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright.errors import TraceError
from shardwright.runtime.traced import Change, TracedFunction, TracedStep, View


@dataclass(frozen=True, slots=True)
class Keep:
    """A tensor that outlives the step that makes or changes it.

    Attributes:
        position: among the leaves of the result, or of the arguments for what was changed; None for what
            the step was not given.
        before: its value before the change; None for a result, and for tensors that every rank has.
        send: another stage, the loss or the result of the step function needs it.
        clone: it will be changed in place before it is sent.
        hold: a later step of this stage must find it without the user's variable.
        view: where it lies in the memory of the argument at `position`, which is another name for it.
    """

    value: int
    position: int | None
    before: int | None
    send: bool
    clone: bool
    hold: bool
    view: View | None = None


@dataclass(frozen=True, slots=True)
class Copy:
    """Memory of another stage that a step changes, on a copy.

    Attributes:
        base: value to copy; all others are views of it.
        from_stage: the value is another stage's; else one that the microbatch holds.
        order: dims of the base from the widest stride to the narrowest.
        views: (position among the leaves of the arguments or None, value after, where it lies in memory); of
            a tensor that is given twice, with each position.
    """

    base: int
    from_stage: bool
    order: tuple[int, ...]
    offset: int
    views: tuple[tuple[int | None, int, View], ...]


@dataclass(slots=True)
class StepFlow:
    """One step.

    Attributes:
        cuts: (position among the leaves of the arguments, value) of inputs that come from another stage.
        held: (position, value) of inputs that the microbatch holds.
        buffers: (position, name) of buffers that microbatches change, one after the other.
        copies: what is copied before it is changed.
        may_change: positions of the arguments that a unit may change other than in the trace; None for all.
    """

    cuts: tuple[tuple[int, int], ...] = ()
    held: tuple[tuple[int, int], ...] = ()
    buffers: tuple[tuple[int, str], ...] = ()
    copies: tuple[Copy, ...] = ()
    keeps: tuple[Keep, ...] = ()
    changes: tuple[Keep, ...] = ()
    may_change: frozenset[int] | None = None

    @property
    def finds(self) -> bool:
        """Whether arguments come from elsewhere than the user's variables."""
        return bool(self.cuts or self.held or self.buffers or self.copies)


@dataclass(slots=True)
class Dataflow:
    """All steps of a trace, once the home of each node is known.

    Attributes:
        flows: one for each step; empty for steps that every rank executes.
        crossings: (value, node that reads it) where the two have different homes.
        displaced: values whose tensor is not in the user's variables.
    """

    trace: TracedFunction
    homes: Sequence[int]
    home_of: Sequence[int]
    flows: list[StepFlow] = field(default_factory=list)
    crossings: list[tuple[int, int]] = field(default_factory=list)
    displaced: set[int] = field(default_factory=set)
    _storage: dict[int, Any] = field(default_factory=dict)  # value -> the real memory it is in, at its home
    _made_at: dict[int, int] = field(default_factory=dict)
    _changed_at: dict[Any, int] = field(default_factory=dict)  # real memory -> last step that changes it
    _held: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        for value, name in self.trace.tensors.initial.items():
            self._storage[value], self._made_at[value] = ("buffer", name), -1
        for index, step in enumerate(self.trace.steps):
            self.flows.append(StepFlow() if step.node is None else self._inputs(index, step))
        self._choose_kept()

    # ---- what steps read ----

    def _inputs(self, index: int, step: TracedStep) -> StepFlow:
        assert step.node is not None
        stage = self.homes[step.node]
        cuts = tuple((position, value) for position, value in step.reads if self.home_of[value] != stage)
        copies = []
        for memory in dict.fromkeys(change.view.memory for change in step.changes):
            group = tuple(change for change in step.changes if change.view.memory == memory)
            if not self._change_in_memory(index, stage, group):
                copies.append(self._copy(index, step, stage, group))
        copied = {position for copy in copies for position, _, _ in copy.views}
        cuts = tuple(cut for cut in cuts if cut[0] not in copied)
        held = tuple(
            (position, value)
            for position, value in step.reads
            if value in self.displaced and self.home_of[value] == stage and position not in copied
        )
        self._held.update(value for _, value in held)
        for _, value in (*cuts, *((0, copy.base) for copy in copies if copy.from_stage)):
            self.crossings.append((value, step.node))
        for position, value in step.writes:
            self._made_at[value] = index
            self._storage[value] = self._storage_of_result(index, step, stage, value)
            if position in step.shared_results:
                self._storage[value] = ("buffer", self.trace.tensors.memory[value])
        initial = self.trace.tensors.initial
        buffers = tuple((position, initial[value]) for position, value in step.reads if value in initial)
        allowed = may_change(self.trace, step, self.homes, self.home_of)
        return StepFlow(cuts=cuts, held=held, buffers=buffers, copies=tuple(copies), may_change=allowed)

    def _storage_of_result(self, index: int, step: TracedStep, stage: int, value: int) -> Any:
        """The memory of a new tensor: that of the input of which it is a view, or its own."""
        memory = self.trace.tensors.memory
        for read in (*(value for _, value in step.reads), *(change.after for change in step.changes)):
            if memory[read] == memory[value]:
                own = self.home_of[read] == stage
                return self._storage[read] if own else ("received", memory[value], stage)
        return ("made", memory[value], index)

    def _change_in_memory(self, index: int, stage: int, group: Sequence[Change]) -> bool:
        """Notes a change of memory that is this stage's own; False where it is not."""
        found: set[Any] = set()
        for change in group:
            if change.before is None:
                found.add(("everywhere", change.view.memory))
            elif self.home_of[change.before] == stage:
                found.add(self._storage[change.before])
            else:
                return False
        if len(found) > 1 or any(storage[0] == "received" for storage in found):
            return False
        (storage,) = found
        self._changed_at[storage] = index
        for change in group:
            self._made_at[change.after] = index
            self._storage[change.after] = storage
            if change.before in self.displaced:
                self.displaced.add(change.after)
        return True

    def _copy(self, index: int, step: TracedStep, stage: int, group: tuple[Change, ...]) -> Copy:
        base = group[0] if len(group) == 1 else self._base(step, group)
        assert base.before is not None
        own = self.home_of[base.before] == stage
        if own:
            self._held.add(base.before)
        for change in group:
            self._made_at[change.after] = index
            self._storage[change.after] = ("copied", change.view.memory, index)
            self.displaced.add(change.after)
        # A tensor with holes (an expanded one) is copied by itself: nothing else is a view of it.
        order = base.view.order or tuple(range(len(base.view.size)))
        views = tuple(
            (position, change.after, change.view)
            for change in group
            for position in _positions_of(change, step)
        )
        return Copy(base.before, not own, order, base.view.offset, views)

    def _base(self, step: TracedStep, group: tuple[Change, ...]) -> Change:
        base = next((b for b in step.bases if b.view.memory == group[0].view.memory), None)
        gradients = {
            self.trace.graph.values[change.before].spec.requires_grad
            for change in (*group, *((base,) if base else ()))
            if change.before is not None
        }
        if base is None or base.before is None or len(gradients) > 1:
            raise TraceError(
                f"{step.line}: a tensor is changed in place on another stage than the one that made it, and "
                "other tensors that are read later share its memory in a way that cannot be followed "
                "(through detach(), or as pieces of a tensor that only one module has). Write x = x + y in "
                "place of x += y, or change a clone()."
            )
        return base

    # ---- what steps leave behind ----

    def _choose_kept(self) -> None:
        graph = self.trace.graph
        sent = {value for value, _ in self.crossings}
        needed = sent | set(graph.outputs) | ({graph.loss} if graph.loss is not None else set())
        self._held |= self.displaced & needed
        for index in reversed(range(len(self.flows))):
            step, flow = self.trace.steps[index], self.flows[index]
            flow.changes = tuple(
                self._keep_change(step, change, needed)
                for change in step.changes
                if change.after in needed or change.after in self._held
            )
            # What is changed without being an argument must be known from where it was made.
            copied = {after for copy in flow.copies for _, after, _ in copy.views}
            self._held.update(
                keep.before
                for keep in flow.changes
                if keep.value not in copied and keep.position is None and keep.before is not None
            )
            flow.keeps = tuple(
                self._keep(value, position, None, needed)
                for position, value in step.writes
                if value in needed or value in self._held
            )

    def _keep_change(self, step: TracedStep, change: Change, needed: set[int]) -> Keep:
        if change.position is not None or change.before is not None:
            return self._keep(change.after, change.position, change.before, needed)
        position = next(
            c.position for c in step.changes if c.position is not None and c.view.memory == change.view.memory
        )
        return self._keep(change.after, position, None, needed, change.view)

    def _keep(
        self, value: int, position: int | None, before: int | None, needed: set[int], view: View | None = None
    ) -> Keep:
        storage = self._storage[value]
        # Later microbatches change a buffer, too.
        changed = storage[0] == "buffer" or self._changed_at.get(storage, -1) > self._made_at[value]
        return Keep(
            value=value,
            position=position,
            before=before,
            send=value in needed,
            clone=value in needed and changed,
            hold=value in self._held,
            view=view,
        )


def _positions_of(change: Change, step: TracedStep) -> Sequence[int | None]:
    """All arguments that are the tensor which is changed, by whichever of them the step does it."""
    if change.position is None:
        return [None]
    return [position for position, value in step.reads if value == change.before] or [change.position]


def may_change(
    trace: TracedFunction, step: TracedStep, homes: Sequence[int], home_of: Sequence[int]
) -> frozenset[int] | None:
    """Positions of the arguments that a unit may change, as nobody would miss it.

    None where there is nothing to watch: it is no unit, or does not look at values.
    """
    nodes = trace.graph.nodes
    if step.node is None or not step.looks_at_values or nodes[step.node].kind != "unit":
        return None
    stage = homes[step.node]
    found = {change.position for change in step.changes if change.position is not None}
    elsewhere = [
        (node, trace.tensors.memory[value])
        for node, home in enumerate(homes)
        if home != stage
        for value in nodes[node].inputs
    ]
    returned = {trace.tensors.memory[value] for value in trace.graph.outputs}
    for position, value in step.reads:
        memory = trace.tensors.memory[value]
        readers = [node for node, other in elsewhere if other == memory]
        if home_of[value] == stage:  # it is sent when the stage ends: with the change
            fine = all(node > step.node for node in readers)
        else:
            fine = all(node < step.node for node in readers) and memory not in returned
        if fine:
            found.add(position)
    return frozenset(found)
