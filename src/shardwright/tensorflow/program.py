"""The program of a step function on one rank: its pieces, and the results that it keeps."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shardwright.runtime.homes import Crossing, Crossings
from shardwright.tensorflow.pieces import BuiltPiece, Pieces
from shardwright.tensorflow.placement import Placement
from shardwright.tensorflow.routes import Part, Routes
from shardwright.tensorflow.step_graph import StepGraph
from shardwright.tensorflow.trace import Trace


@dataclass(frozen=True, slots=True)
class Work:
    """What one action of a stage does.

    Attributes:
        arriving: what it takes in from other ranks, in the order of their stages, each with its name.
        piece: that it runs; None where there is nothing to run.
    """

    arriving: tuple[tuple[Crossing, str], ...]
    piece: BuiltPiece | None


@dataclass(slots=True, kw_only=True)
class Program:
    """A step function cut into pieces; see `shardwright.runtime.batch_schedules.RankProgram`."""

    trace: Trace
    graph: StepGraph
    placement: Placement
    routes: Routes
    stage_ranks: tuple[int, ...]
    rank: int
    pieces: Pieces
    _again: "Program | None" = None
    _work: dict[tuple[Part, int], Work] = field(default_factory=dict)

    @property
    def crossings(self) -> Crossings:
        """What forwards send."""
        return self.routes.crossings

    @property
    def gradients(self) -> Crossings:
        """What backwards send."""
        return self.routes.gradients

    @property
    def state(self) -> Mapping[str, int]:
        """Nothing: variables have homes of their own (`Placement.owners`)."""
        return {}

    @property
    def offloads(self) -> frozenset[int]:
        """No stage copies activations to the host."""
        return frozenset()

    @property
    def constants(self) -> frozenset[str]:
        """The tensors from other ranks that are alike in all microbatches."""
        return frozenset(self.routes.tensors[number] for number in self.routes.constants)

    def again(self) -> "Program":
        """The same for another microbatch of a batch, when the first has brought the constants."""
        if not self.routes.constants:
            return self
        if self._again is None:
            crossings = {
                pair: tuple(each for each in group if each.value not in self.routes.constants)
                for pair, group in self.routes.crossings.items()
            }
            self._again = replace(self, routes=replace(self.routes, crossings=crossings), _work={})
        return self._again

    def work(self, part: Part, stage: int) -> Work:
        """What an action does; made when it is first asked for."""
        key = part, stage
        if key not in self._work:
            arriving = tuple((crossing, self.name_of(crossing)) for crossing in self._arriving(part, stage))
            self._work[key] = Work(arriving, self.pieces.built(part, stage))
        return self._work[key]

    def _arriving(self, part: Part, stage: int) -> tuple[Crossing, ...]:
        routes = self.routes.gradients if part in ("backward", "inputs") else self.routes.crossings
        if part == "weights":
            return ()
        return tuple(
            crossing
            for (source, target), group in routes.items()
            if target == stage and self.stage_ranks[source] != self.rank
            for crossing in group
        )

    def name_of(self, crossing: Crossing) -> str:
        """The tensor that crosses."""
        return self.routes.tensors[crossing.value]

    def ranks_of_output(self, position: int) -> list[int]:
        """The pipeline ranks that make an output of the step function, or a part of its sum."""
        return sorted({self.stage_ranks[stage] for stage in self.routes.stages_of_output[position]})

    def holder(self, variable: int) -> int:
        """The pipeline rank that holds a variable."""
        return self.stage_ranks[self.placement.owners[variable]]
