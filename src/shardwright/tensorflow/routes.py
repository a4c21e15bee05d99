"""What each piece of a step takes in and gives out, and what crosses from stage to stage.

A stage has a forward piece and a backward piece. A schedule that splits backwards runs the latter in two:
what gradients for earlier stages need (*inputs*), and the rest (*weights*).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardwright.errors import TraceError
from shardwright.runtime.homes import Crossing, Crossings
from shardwright.tensorflow.placement import Placement
from shardwright.tensorflow.step_graph import READS, Operation, StepGraph

Part = Literal["forward", "backward", "inputs", "weights"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the work of one stage on a microbatch.

    Attributes:
        body: names of its operations, with the free ones that it computes anew.
        feeds: tensors that it takes in: arguments of the step function, and what other pieces make.
        gives: tensors that other pieces, other ranks or the caller take.
        effects: names of operations that are run for what they do.
        sums: gradients that it makes, each with the position of the output whose sum over the microbatches
            it adds to.
        behind: name of an operation that repeats a forward -> those of the backward that it waits for.
    """

    part: Part
    stage: int
    body: frozenset[str]
    feeds: tuple[str, ...]
    gives: tuple[str, ...]
    effects: tuple[str, ...]
    sums: tuple[tuple[str, int], ...] = ()
    behind: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Routes:
    """The pieces of a step, and what goes between them.

    Attributes:
        pieces: (part, stage) -> piece; those of a whole backward and of one in two.
        crossings: what forwards send: (source, target) -> tensors.
        gradients: what backwards send: (source, target) -> tensors.
        tensors: name of each tensor that crosses, by the number that `Crossing.value` has.
        stages_of_output: stages that make each output, or a part of its sum.
        constants: numbers of those tensors that are alike in all microbatches, such as weights that another
            stage uses: forwards send them once in a batch.
    """

    pieces: Mapping[tuple[Part, int], Piece]
    crossings: Crossings
    gradients: Crossings
    tensors: tuple[str, ...]
    stages_of_output: tuple[tuple[int, ...], ...]
    trains: bool
    constants: frozenset[int] = frozenset()


def routes_of(graph: StepGraph, placement: Placement) -> Routes:
    """Cuts a placed step into pieces."""
    return _Cut(graph, placement).routes()


def has_effect(operation: Operation) -> bool:
    """Whether an operation is run for what it does."""
    if operation.kind in READS or operation.kind == "Placeholder":
        return False
    return operation.stateful or not operation.outputs


class _Cut:
    def __init__(self, graph: StepGraph, placement: Placement):
        self._graph = graph
        self._placement = placement
        self._operations = {operation.name: operation for operation in graph.operations}
        self._maker = graph.makers()
        self._arguments = frozenset(graph.arguments)
        self._own: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        for operation in graph.operations:
            place = placement.places[operation.name]
            if place.phase in ("forward", "backward") and operation.name not in placement.addends.left_out:
                self._own[place.phase, place.stage].add(operation.name)
        parts = placement.addends.parts
        self._parts = [parts.get(name, (name,)) for name in graph.outputs]
        self._sums: defaultdict[str, list[int]] = defaultdict(list)
        for position in sorted(graph.sums):
            for tensor in self._parts[position]:
                self._sums[tensor].append(position)
        self._kept = {name for position, name in enumerate(graph.outputs) if position not in graph.sums}
        self._free_outputs = [
            name for name in graph.outputs if placement.places[self._maker[name].name].phase == "free"
        ]

    def routes(self) -> Routes:
        stages = range(self._placement.num_stages)
        feeds = {key: self._feeds(own, key[1])[1] for key, own in list(self._own.items())}
        crossings, gradients = self._crossings(feeds)
        sent = {tensor for tensors in (*crossings.values(), *gradients.values()) for tensor in tensors}
        sets: dict[tuple[Part, int], set[str]] = {}
        for stage in stages:
            whole = self._own["backward", stage]
            inputs = self._needed_for(sent, whole)
            sets["forward", stage] = self._own["forward", stage]
            sets["backward", stage] = whole
            sets["inputs", stage] = inputs
            sets["weights", stage] = whole - inputs
        bodies = {key: self._feeds(own, key[1]) for key, own in sets.items()}
        wanted = {
            is_split: self._kept.union(*(feeds for key, (_, feeds) in bodies.items() if key[0] in parts))
            for is_split, parts in (
                (False, ("forward", "backward")),
                (True, ("forward", "inputs", "weights")),
            )
        }
        pieces = {
            key: self._piece(key, own, *bodies[key], wanted[key[0] != "backward"])
            for key, own in sets.items()
        }
        numbers = {tensor: number for number, tensor in enumerate(sorted(sent))}
        return Routes(
            pieces=pieces,
            crossings=self._numbered(crossings, numbers),
            gradients=self._numbered(gradients, numbers),
            tensors=tuple(numbers),
            stages_of_output=tuple(
                tuple(sorted({self._placement.places[self._maker[part].name].stage for part in parts}))
                for parts in self._parts
            ),
            trains=any(key[0] == "backward" and own for key, own in self._own.items()),
            constants=self._constants({number: tensor for tensor, number in numbers.items()}),
        )

    def _constants(self, tensors: Mapping[int, str]) -> frozenset[int]:
        """Those that rest on variables that the step leaves as they are, not on the batch or on chance."""
        alike: set[str] = set()
        for operation in self._graph.operations:
            if operation.name in self._graph.variables or operation.name in self._placement.read_again:
                alike.add(operation.name)
            elif not operation.stateful and self._arguments.isdisjoint(operation.outputs):
                makers = (self._maker[tensor].name for tensor in operation.inputs)
                if all(name in alike for name in makers):
                    alike.add(operation.name)
        return frozenset(
            number
            for number, tensor in tensors.items()
            if self._maker[tensor].name in alike
            and self._placement.places[self._maker[tensor].name].phase == "forward"
        )

    # ---- pieces ----

    def _feeds(self, own: Iterable[str], stage: int) -> tuple[frozenset[str], list[str]]:
        """What a piece with these operations computes, and what it takes in."""
        own = set(own)
        body: set[str] = set()
        feeds: set[str] = set()
        pending = list(own)
        while pending:
            name = pending.pop()
            if name in body:
                continue
            body.add(name)
            for tensor in self._operations[name].inputs:
                maker = self._maker[tensor]
                place = self._placement.places[maker.name]
                if tensor in self._arguments:
                    feeds.add(tensor)
                elif place.phase == "free" or maker.name in own or self._is_repeated(maker, stage):
                    pending.append(maker.name)
                elif place.phase != "variable":
                    feeds.add(tensor)
        return frozenset(body), sorted(feeds)

    def _is_repeated(self, operation: Operation, stage: int) -> bool:
        """Whether a backward repeats an operation of its stage's forward, so that no value is kept for it."""
        placement = self._placement
        if placement.places[operation.name].stage != stage:
            return False
        return operation.name in placement.read_again or operation.name in placement.recomputed

    def _behind(self, own: set[str], body: frozenset[str]) -> dict[str, tuple[str, ...]]:
        """What repeated operations wait for: the gradient of their unit, or all units would be repeated at
        once, and be in memory together.

        ::

            gradient of unit 2 ─┬──────────▶ backward of unit 2 ─▶ gradient of unit 1 ─┬─ ...
                                └▶ unit 2 ─────────┘                                   └▶ unit 1 ...

        The first operation of the backward that takes a result of the repeated unit comes before all others
        that do, so what it takes beside rests on none of them.
        """
        repeated = {name: call for name, call in self._placement.recomputed.items() if name in body - own}
        waits_for: dict[int, tuple[str, ...]] = {}
        for operation in self._graph.operations if repeated else ():
            if operation.name not in own:
                continue
            makers = [self._maker[tensor].name for tensor in operation.inputs]
            gradients = tuple(name for name in makers if name in own)
            for name in makers:
                if name in repeated:
                    waits_for.setdefault(repeated[name], gradients)
        return {
            name: waits_for[call]
            for name, call in repeated.items()
            if waits_for.get(call)
            and not any(self._maker[tensor].name in repeated for tensor in self._operations[name].inputs)
        }

    def _needed_for(self, sent: Iterable[str], whole: set[str]) -> set[str]:
        """The operations of a backward that what it sends rests on."""
        found: set[str] = set()
        pending = [self._maker[tensor].name for tensor in sent if self._maker[tensor].name in whole]
        while pending:
            name = pending.pop()
            if name in found:
                continue
            found.add(name)
            operation = self._operations[name]
            before = (*(self._maker[tensor].name for tensor in operation.inputs), *operation.controls)
            pending += [other for other in before if other in whole]
        return found

    def _piece(
        self,
        key: tuple[Part, int],
        own: set[str],
        body: frozenset[str],
        feeds: list[str],
        wanted: set[str],
    ) -> Piece:
        part, stage = key
        made = {tensor for name in own for tensor in self._operations[name].outputs}
        gives = made & wanted
        if key == ("forward", 0):  # what every rank could compute comes from the first
            more_body, more_feeds = self._feeds({self._maker[t].name for t in self._free_outputs}, stage)
            body, feeds = body | more_body, sorted({*feeds, *more_feeds})
            gives |= self._kept.intersection(self._free_outputs)
            made.update(self._free_outputs)
        return Piece(
            part=part,
            stage=stage,
            body=body,
            feeds=tuple(feeds),
            gives=tuple(sorted(gives)),
            effects=tuple(name for name, op in self._operations.items() if name in own and has_effect(op)),
            sums=tuple((tensor, at) for tensor in sorted(made) for at in self._sums.get(tensor, ())),
            behind={} if part == "forward" else self._behind(own, body),
        )

    # ---- what crosses ----

    def _crossings(
        self, feeds: Mapping[tuple[str, int], list[str]]
    ) -> tuple[dict[tuple[int, int], list[str]], dict[tuple[int, int], list[str]]]:
        """The tensors that forwards send, and those that backwards send."""
        up: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
        down: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
        for stage in range(self._placement.num_stages):
            in_forward = set(feeds.get(("forward", stage), ()))
            for tensor in sorted(in_forward.union(feeds.get(("backward", stage), ()))):
                place = self._placement.places[self._maker[tensor].name]
                if tensor in self._arguments or place.stage == stage:
                    continue
                self._check_sendable(tensor)
                if place.phase == "forward" and place.stage < stage:
                    up[place.stage, stage].append(tensor)
                elif place.stage > stage and tensor not in in_forward:
                    down[place.stage, stage].append(tensor)
                else:
                    raise self._uphill(tensor, place.stage, stage)
        return up, down

    def _check_sendable(self, tensor: str) -> None:
        spec, line = self._graph.specs[tensor], self._graph.line_of(self._maker[tensor].name)
        if tensor in self._graph.local:
            raise TraceError(
                f"{line}: a {spec.dtype} tensor would go from one stage to another, and has no bytes to "
                "send. Use it in the layer that makes it, or place both layers on one rank (sw.partition)."
            )
        if -1 in spec.shape:
            raise TraceError(
                f"{line}: the shape {spec.shape} of a tensor that goes from one stage to another follows "
                "from values, so no rank can make room for it. Keep it inside one layer, or give it a shape "
                "that follows from the batch's (tf.ensure_shape, padding)."
            )

    def _uphill(self, tensor: str, source: int, target: int) -> TraceError:
        maker = self._maker[tensor]
        phase = self._placement.places[maker.name].phase
        reader = next(
            op.name
            for op in self._graph.operations
            if tensor in op.inputs and self._placement.places[op.name].stage == target
        )
        return TraceError(
            f"{self._graph.line_of(reader)}: what the {phase} of stage {source} makes at "
            f"{self._graph.line_of(maker.name)} would be needed by stage {target}, which has run by then. "
            "A step calls the layers in the order of the stages once, then asks for gradients. Return the "
            "gradients, and go on outside of the step function; or use one stage for these layers "
            "(sw.partition)."
        )

    def _numbered(
        self, pairs: Mapping[tuple[int, int], list[str]], numbers: Mapping[str, int]
    ) -> dict[tuple[int, int], tuple[Crossing, ...]]:
        return {
            (source, target): tuple(
                Crossing(numbers[tensor], source, target, self._graph.specs[tensor], has_gradient=False)
                for tensor in tensors
            )
            for (source, target), tensors in sorted(pairs.items())
        }
