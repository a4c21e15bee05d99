"""Places every operation of a step on a stage, in its forward or its backward.

::

            stage 0                     stage 1
    F    wte ─ block 0 ──────────────▶ block 1 ─ loss          1. a variable is where it is used first
          │       │                      │        │            2. glue goes with the latest of its inputs
    B    dwte ◀─ dblock 0 ◀─────────── dblock 1 ◀─┘            3. a gradient goes where its forward values are

What rests on the batch and on constants alone is *free*: every piece that needs it computes it anew. Results
that are whole numbers are computed in the forward even where gradients ask for them: shapes are kept, and not
the activations that have them.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal

from shardwright.errors import TraceError
from shardwright.tensorflow.row_gradients import Addends, taken_apart
from shardwright.tensorflow.step_graph import READS, Operation, StepGraph

# So that what makes a tensor that cannot be sent goes where that is used.
_NEVER_SENT = 1 << 60

Phase = Literal["free", "variable", "forward", "backward"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an operation runs.

    Attributes:
        phase: ``"free"`` for what every piece computes that needs it, ``"variable"`` for a handle.
        stage: of the pipeline; 0 for these two, where it means nothing.
    """

    phase: Phase
    stage: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """The places of a step's operations.

    Attributes:
        places: name of an operation -> its place.
        owners: number of a variable -> stage that holds it.
        read_again: reads of weights that a backward repeats, so that no value is kept for it.
        recomputed: name of an operation that a backward repeats -> its unit call.
        addends: gradients that each stage sums its own part of.
    """

    num_stages: int
    places: Mapping[str, Place]
    owners: Mapping[int, int]
    read_again: frozenset[str]
    recomputed: Mapping[str, int] = field(default_factory=dict)
    addends: Addends = field(default_factory=Addends)


def place(
    graph: StepGraph,
    stage_of_call: Sequence[int],
    *,
    num_stages: int,
    held: Mapping[int, int] | None = None,
    recompute: Set[int] = frozenset(),
    microbatches: int = 1,
) -> Placement:
    """Places all operations."""
    known = {**_owners_by_unit(graph, stage_of_call), **(held or {})}
    owners, late = known, frozenset[int]()
    # Again and again: variables of the glue, such as those of metrics, belong to the latest stage that writes
    # them, which moves what rests on their values, and with it perhaps other variables of the glue.
    for _ in range(num_stages + 1):
        placer = _Placer(graph, stage_of_call, num_stages, owners=owners, late=late, is_draft=True)
        placer.place_all()
        found = {**placer.owners_of_glue(), **known}
        found_late = placer.changed_in_backward() if microbatches > 1 else late
        if (found, found_late) == (owners, late):
            break
        owners, late = found, found_late
    placer = _Placer(graph, stage_of_call, num_stages, owners=owners, late=late, is_draft=False)
    placer.place_all()
    backward = {name: each.stage for name, each in placer.places.items() if each.phase == "backward"}
    addends = taken_apart(graph, backward, placer.owners)
    placer.pull_down(addends, microbatches)
    again = frozenset(placer.read_again)
    recomputed = _recomputed(graph, placer.places, recompute)
    return Placement(num_stages, placer.places, placer.owners, again, recomputed, addends)


def _owners_by_unit(graph: StepGraph, stage_of_call: Sequence[int]) -> dict[int, int]:
    owners: dict[int, int] = {}
    for operation in graph.operations:
        if operation.call is not None:
            for variable in graph.variables_of(operation):
                owners.setdefault(variable, stage_of_call[operation.call])
    return owners


def _recomputed(graph: StepGraph, places: Mapping[str, Place], calls: Set[int]) -> dict[str, int]:
    """The operations inside of these calls that can be repeated: their results do not leave the call.

    What draws random numbers or changes a variable is not: its results are kept.
    """
    leaving = set(graph.outputs)
    call_of = {tensor: op.call for op in graph.operations for tensor in op.outputs}
    for operation in graph.operations:
        if places[operation.name].phase == "forward":
            leaving.update(tensor for tensor in operation.inputs if call_of[tensor] != operation.call)
    return {
        operation.name: operation.call
        for operation in graph.operations
        if operation.call is not None
        and operation.call in calls
        and places[operation.name].phase == "forward"
        and not operation.stateful
        and leaving.isdisjoint(operation.outputs)
    }


class _Placer:
    """One pass over the operations, in order."""

    def __init__(
        self,
        graph: StepGraph,
        stage_of_call: Sequence[int],
        num_stages: int,
        *,
        owners: Mapping[int, int],
        late: Set[int],
        is_draft: bool,
    ):
        self.places: dict[str, Place] = {}
        self.read_again: set[str] = set()
        self.owners = dict(owners)
        self._late = late
        self._is_draft = is_draft
        self._graph = graph
        self._stage_of_call = stage_of_call
        self._num_stages = num_stages
        self._written = graph.written()
        self._weight_reads = graph.weight_reads()
        self._maker = {tensor: op.name for op in graph.operations for tensor in op.outputs}
        # Stages whose forward makes or takes in a value.
        self._there: defaultdict[str, set[int]] = defaultdict(set)

    def place_all(self) -> None:
        for operation in self._graph.operations:
            self.places[operation.name] = self._place(operation)

    def owners_of_glue(self) -> dict[int, int]:
        """The stages of variables, taken from those that use them: the latest that changes one, or else the
        first that has a use for its value."""
        changed: defaultdict[int, set[int]] = defaultdict(set)
        used: defaultdict[int, set[int]] = defaultdict(set)
        readers: defaultdict[str, set[int]] = defaultdict(set)
        for operation in self._graph.operations:
            place = self.places[operation.name]
            if place.phase == "forward":
                for tensor in operation.inputs:
                    readers[self._maker[tensor]].add(place.stage)
        for operation in self._graph.operations:
            place = self.places[operation.name]
            for variable in self._graph.variables_of(operation):
                if place.phase in ("forward", "backward"):
                    stages = readers[operation.name] if operation.kind in READS else set()
                    changes = operation.kind not in READS
                    (changed if changes else used)[variable].update(stages or {place.stage})
        return {
            variable: max(changed[variable]) if changed[variable] else min(used[variable])
            for variable in {*changed, *used}
        }

    def changed_in_backward(self) -> frozenset[int]:
        """The variables that a backward changes: a metric of gradients, for example.

        A forward may not read them: that of a later microbatch would come before the change by an earlier
        one, which it takes no part in and would undo.
        """
        return frozenset(
            variable
            for operation in self._graph.operations
            if self.places[operation.name].phase == "backward" and operation.kind not in READS
            for variable in self._written.intersection(self._graph.variables_of(operation))
        )

    # ---- one operation ----

    def _place(self, operation: Operation) -> Place:
        if operation.name in self._graph.variables:
            return Place("variable")
        forward, backward = self._inputs(operation)
        variables = self._graph.variables_of(operation)
        if not forward and not backward and not variables:
            return self._place_of_source(operation)
        if not backward and not operation.in_gradient and self._late.isdisjoint(variables):
            return self._place_in_forward(operation, forward, variables)
        return self._place_in_backward(operation, forward, backward, variables)

    def _inputs(self, operation: Operation) -> tuple[list[str], list[str]]:
        """The values of forwards and of backwards that an operation reads."""
        forward, backward = [], []
        for tensor in operation.inputs:
            phase = self.places[self._maker[tensor]].phase
            if phase == "forward":
                forward.append(tensor)
            elif phase == "backward":
                backward.append(tensor)
        return forward, backward

    def _stage_of(self, tensor: str) -> int:
        return self.places[self._maker[tensor]].stage

    def _place_of_source(self, operation: Operation) -> Place:
        """Of an operation that rests on the batch alone, if on anything."""
        if operation.stateful and operation.kind != "Placeholder":
            stage = 0 if operation.call is None else self._stage_of_call[operation.call]
            return self._taken(operation, stage, ())
        before = (self.places.get(name) for name in operation.controls)
        run = [place for place in before if place is not None and place.phase in ("forward", "backward")]
        return run[-1] if operation.kind == "NoOp" and run else Place("free")

    def _place_in_forward(
        self, operation: Operation, forward: Sequence[str], variables: Sequence[int]
    ) -> Place:
        latest = max((self._stage_of(tensor) for tensor in forward), default=0)
        if operation.call is not None:
            latest = max(latest, self._stage_of_call[operation.call])
        if not variables:
            if operation.name in self._weight_reads and self._is_read_at(latest, forward):
                self.read_again.add(operation.name)
            return self._taken(operation, latest, forward)
        owner = max(self.owners.setdefault(variable, latest) for variable in variables)
        made = max((self._stage_of(tensor) for tensor in forward), default=0)
        if self._is_draft:
            owner = max(owner, made)
        if made > owner:
            raise self._out_of_reach(operation, owner, made)
        if operation.name in self._weight_reads:
            self.read_again.add(operation.name)
        return self._taken(operation, owner, forward)

    def _is_read_at(self, stage: int, tensors: Sequence[str]) -> bool:
        """Whether a stage reads these again in its backward."""
        makers = (self._maker[tensor] for tensor in tensors)
        return all(name in self.read_again and self.places[name].stage == stage for name in makers)

    def _place_in_backward(
        self, operation: Operation, forward: Sequence[str], backward: Sequence[str], variables: Sequence[int]
    ) -> Place:
        for variable in variables:
            self.owners.setdefault(variable, self._num_stages - 1)
        has_all = set(range(self._num_stages))
        for tensor in forward:
            has_all &= self._there[tensor]
        has_all.intersection_update(*({self.owners[variable]} for variable in variables))
        made = max((self._stage_of(tensor) for tensor in forward), default=0)
        if not backward:
            stage = max(has_all, default=made)
            whole_numbers = (
                bool(operation.outputs)
                and self._late.isdisjoint(variables)
                and all(
                    self._graph.specs[tensor].dtype.startswith(("int", "uint"))
                    for tensor in operation.outputs
                )
            )
            return self._taken(operation, stage, forward) if whole_numbers else Place("backward", stage)
        earliest = min(self._stage_of(tensor) for tensor in backward)
        reachable = [stage for stage in has_all if stage <= earliest]
        stage = max(reachable, default=min(earliest, made))
        for variable in variables:
            if self.owners[variable] != stage and not self._is_draft:
                raise self._out_of_reach(operation, self.owners[variable], earliest)
        return Place("backward", stage)

    def _out_of_reach(self, operation: Operation, owner: int, made: int) -> TraceError:
        return TraceError(
            f"{self._graph.line_of(operation.name)}: {operation.kind} of a variable that stage {owner} holds "
            f"needs what stage {made} makes. Forwards send nothing to earlier stages, and "
            "backwards nothing to later ones. Use the variable in the stage that holds it, or place the "
            "layers that share it on one rank (sw.partition)."
        )

    def _taken(self, operation: Operation, stage: int, forward: Sequence[str]) -> Place:
        """A place in a forward, which then has the operation's inputs and outputs."""
        for tensor in (*forward, *operation.outputs):
            self._there[tensor].add(stage)
        return Place("forward", stage)

    # ---- afterwards ----

    def pull_down(self, addends: Addends, microbatches: int) -> None:
        """Moves backward operations to the earlier stage that alone uses them, if that sends no more."""
        uses: defaultdict[str, set[int]] = defaultdict(set)
        summed: set[str] = set()
        for tensor in self._graph.outputs:
            variable = self._graph.gradients.get(tensor)
            if variable is not None and variable in self.owners:
                for part in addends.parts.get(tensor, (tensor,)):
                    uses[self._maker[part]].add(self.owners[variable])
                summed.update(self._maker[part] for part in addends.parts.get(tensor, ()))
        for operation in reversed(self._graph.operations):
            here = self.places[operation.name]
            if here.phase != "backward" or operation.name in addends.left_out:
                continue
            wanted = max(uses[operation.name], default=here.stage)
            times = microbatches if operation.name in summed else 1
            can_move = wanted < here.stage and not operation.stateful
            if can_move and self._can_move(operation, wanted, uses, times=times):
                here = self.places[operation.name] = Place("backward", wanted)
            for tensor in operation.inputs:
                uses[self._maker[tensor]].add(here.stage)

    def _can_move(
        self, operation: Operation, stage: int, uses: Mapping[str, set[int]], *, times: int
    ) -> bool:
        """Whether an operation may go to an earlier stage."""
        forward, backward = self._inputs(operation)
        if not all(stage in self._there[tensor] for tensor in forward):
            return False
        if any(self.owners[variable] != stage for variable in self._graph.variables_of(operation)):
            return False
        sent_instead = times * sum(self._bytes(tensor) for tensor in backward)
        if sent_instead <= sum(self._bytes(tensor) for tensor in operation.outputs):
            return True
        return all(stage in uses[self._maker[tensor]] for tensor in backward)

    def _bytes(self, tensor: str) -> int:
        return _NEVER_SENT if tensor in self._graph.local else self._graph.specs[tensor].num_bytes
