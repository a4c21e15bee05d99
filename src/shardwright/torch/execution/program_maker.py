"""Finds the cached program of a microbatch, or traces it."""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from shardwright.model_graph import ModelGraph
from shardwright.placement import BetweenUnits
from shardwright.plan import Plan
from shardwright.run.context import Context
from shardwright.runtime.homes import Assignment, assign
from shardwright.torch.batch.batch import Batch
from shardwright.torch.counting.compiled_modules import compile_units
from shardwright.torch.execution.agreement import Agreement, TrainedModel
from shardwright.torch.interception.glue import intercept_calls
from shardwright.torch.interception.step_code import asks_for_types
from shardwright.torch.parameters.residency import Residency
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.program.instructions import KeptOtherwise
from shardwright.torch.program.program import Program, build_program
from shardwright.torch.program.program_cache import Circumstances, ProgramCache, signature_of
from shardwright.torch.python_state.attribute_watch import AttributeWatch
from shardwright.torch.python_state.watched_numbers import NumberMatters, NumberPath, NumberReads
from shardwright.torch.pytorch.modules import line_of
from shardwright.torch.tensor_parallel.boundary import Boundary
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tracing.batch_statistics import (
    refuse_recomputed_vectors,
    warn_of_recomputed_buffers,
)
from shardwright.torch.tracing.trace import trace_step
from shardwright.torch.tracing.trace_data import Trace


class KnownTrace:
    """A trace that serves microbatches of its signature, as long as nothing but the batch has changed."""

    def __init__(self, part: Batch, trace: Trace, assignment: Assignment):
        self.trace = trace
        self.assignment = assignment
        self._signature = signature_of(part)

    def holds_for(self, part: Batch) -> bool:
        return self._signature == signature_of(part) and self.trace.holds_for(part)


class ProgramMaker:
    """Caches the programs of the microbatches seen so far, and makes those of others."""

    def __init__(
        self, context: Context, model: TrainedModel, agreement: Agreement, attributes: AttributeWatch
    ):
        self._context = context
        self._model = model
        self._agreement = agreement
        self._attributes = attributes
        self._cache = ProgramCache(warns=context.rank == 0)
        self._circumstances = Circumstances(())
        # What all ranks have traced together, and no rank reads anything in.
        self._read_nothing: set[Hashable] = set()
        self._units: UnitMap | None = None
        self._residency: Residency | None = None
        self._kept = KeptOtherwise()
        self._divided: frozenset[str] = frozenset()
        self._group: TensorGroup | None = None

    # ---- the first step ----

    @property
    def units(self) -> UnitMap:
        """The units, with the parameters and buffers that they have now."""
        assert self._units is not None
        return self._units

    def set_units(self, names: Sequence[str]) -> UnitMap:
        """Looks for the units in the model, as it is now, and intercepts their calls."""
        self._units = UnitMap.of(self._model.get_module(), names)
        compile_units(self._model.get_module(), names)
        for unit in self._units.modules.values():
            intercept_calls(unit)
        return self._units

    def note_new_tensors(self) -> UnitMap:
        """Looks up the parameters and buffers of the units again."""
        self._units = self.units.with_new_tensors()
        return self._units

    def placed(
        self,
        residency: Residency,
        kept: KeptOtherwise,
        divided: frozenset[str],
        group: TensorGroup | None = None,
    ) -> None:
        self._group = group
        self._residency = residency
        self._kept = kept
        self._divided = divided

    def trace(
        self,
        function: Callable[..., Any],
        part: Batch,
        *,
        agree_on_end: Callable[[float], float] | None = None,
        numbers: NumberReads | None = None,
    ) -> Trace:
        """Traces a microbatch, on all ranks unless they agree on its end otherwise; see `trace_step`."""
        return trace_step(
            self.units,
            function,
            part.arguments,
            device=self._context.device,
            batch_size=part.num_samples or 1,
            agree_on_end=agree_on_end or self._agreement.on_end,
            numbers=numbers,
        )

    # ---- every step ----

    def of_batch(
        self,
        function: Callable[..., Any],
        parts: list[Batch],
        path: Hashable,
        attributes: Hashable,
        known: KnownTrace | None,
    ) -> list[Program]:
        """The program of each microbatch; traces where there is none.

        Ranks agree on where a trace ends, so that all of them make it, or none: they ask each other whether
        one has to. But not in every step, where there was nothing to agree on the first time: then each rank
        traces what it has to (an attribute that was set on it alone), and asks where it finds an end now.
        """
        if self._circumstances.key != (path, attributes):
            self._circumstances = Circumstances((path, attributes))
        found = self._cache.find_all(parts, self._circumstances)
        programs = [program for program in found if program is not None]
        if len(programs) == len(parts) and all(program.reads_nothing for program in programs):
            return programs
        keys = {(path, signature_of(part, but_numbers=True)) for part in parts}
        together = not keys <= self._read_nothing
        if together and not self._agreement.on_any(None in found):
            return programs
        programs = [
            self._program(function, part, path, attributes, known, together=together) for part in parts
        ]
        if not any(program.trace.ends for program in programs):
            self._read_nothing |= keys
            for program in programs:
                program.reads_nothing = True
        return programs

    def _program(
        self,
        function: Callable[..., Any],
        part: Batch,
        path: Hashable,
        attributes: Hashable,
        known: KnownTrace | None,
        *,
        together: bool = False,
    ) -> Program:
        circumstances = self._circumstances
        found = self._cache.find(part, circumstances)
        if self._on_any(found is None, together):
            found = None
        if found is not None:
            return found
        numbers: NumberPath | None = None
        watched = False
        assignment: Assignment | None = None
        with self._model.replicas.shapes_at_hand():
            if self._on_all(known is not None and known.holds_for(part), together):
                assert known is not None
                trace, assignment = known.trace, known.assignment
            else:
                self.set_units(list(self.units.modules))  # a script may have put other modules there
                watches = self._cache.watches_numbers(part, circumstances) and not asks_for_types(function)
                watched = self._on_all(watches, together)
                if watched:
                    trace, numbers = self._trace_watching_numbers(function, part, together=together)
                else:
                    on_end = None if together else self._on_end_alone
                    trace = self.trace(function, part, agree_on_end=on_end)
        program = self._built(trace, assignment)
        self._cache.keep(
            part, circumstances, trace, program, watched=watched, numbers=numbers, where=line_of(function)
        )
        if self._context.plan is not None and self._context.plan.schedule.microbatches > 1:
            refuse_recomputed_vectors(self._model.get_module(), program.trace.repeated_buffers)
            warn_of_recomputed_buffers(self._model.get_module(), program.trace.repeated_buffers)
        self._attributes.traced((path, signature_of(part)), trace.digest)
        return program

    def _on_end_alone(self, end: float) -> float:
        """Agrees on the end of a trace that other ranks may not make: they do if the batch is its cause."""
        return self._agreement.on_end(end) if math.isfinite(end) else end

    def _on_any(self, found: bool, together: bool) -> bool:
        return self._agreement.on_any(found) if together else found

    def _on_all(self, found: bool, together: bool) -> bool:
        return not self._on_any(not found, together)

    def _trace_watching_numbers(
        self, function: Callable[..., Any], part: Batch, *, together: bool
    ) -> tuple[Trace, NumberPath | None]:
        """A trace, and for which numbers among the arguments it holds; None for those of this part alone."""
        reads, asked = NumberReads(), False

        def agree_on_end(end: float) -> float:
            nonlocal asked
            asked = True
            if together and self._agreement.on_any(reads.matter):
                raise NumberMatters  # here, or to another rank
            return self._agreement.on_end(end) if together else self._on_end_alone(end)

        general: Trace | None = None
        try:
            general = self.trace(function, part, agree_on_end=agree_on_end, numbers=reads)
        except NumberMatters:
            if together and not asked:
                self._agreement.on_any(True)
        except Exception:  # what is no number of Python's own may fail elsewhere
            if together and asked:
                raise
            if together:
                self._agreement.on_any(True)
        numbers = reads.path()
        trace = self.trace(function, part, agree_on_end=None if together else self._on_end_alone)
        # Some code asks for the type of a number: it must not have made a difference.
        same = general is not None and not reads.matter and general.digest == trace.digest
        return trace, numbers if self._on_all(same and numbers is not None, together) else None

    def _built(self, trace: Trace, assignment: Assignment | None) -> Program:
        plan, residency = self._context.plan, self._residency
        assert plan is not None
        assert residency is not None
        placed = assignment or assign(trace.graph, plan, residency.ranks)
        program = build_program(
            trace,
            placed,
            rank=self._context.pipeline_rank,
            kept=self._kept,
            divided=self._divided,
            boundary=self._boundary(trace, plan),
        )
        uses = Residency.of(trace.graph, placed.homes, placed.stage_ranks)
        program.as_planned = placed.stage_ranks == plan.stage_ranks and residency.covers(uses)
        program.state = {**_buffers_of_spare_units(trace.graph, placed, residency), **program.state}
        return program

    def _boundary(self, trace: Trace, plan: Plan) -> Boundary | None:
        """Places the tensors between units; None where each rank has a batch of its own."""
        if self._group is None or plan.tensor is None:
            return None
        between = BetweenUnits.of_batch(
            trace.batch_shapes,
            plan.tensor.between_units,
            num_ranks=self._group.num_ranks,
            inner_ranks=1 if self._group.inner is None else self._group.inner.num_ranks,
            inner_dim=plan.tensor.cut_again,
        )
        return Boundary(self._group, between)


def _buffers_of_spare_units(graph: ModelGraph, placed: Assignment, residency: Residency) -> dict[str, int]:
    """Changed buffers of units that the plan does not place, which all ranks hold -> rank of the unit."""
    found = {}
    for call, stage in placed.stage_of_call.items():
        unit = graph.units[graph.nodes[call].name]
        for name in unit.parameters if unit.mutates_buffers else ():
            if graph.parameters[name].is_buffer and residency.stages.get(name) == ():
                found[name] = placed.stage_ranks[stage]
    return found
