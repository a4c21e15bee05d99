"""Plans a run from its first batch: traces, describes the model, places units and variables."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from shardwright.config import Config
from shardwright.errors import PlanError, TraceError
from shardwright.model_graph import TensorSpec
from shardwright.plan import Plan, stage_of_label
from shardwright.planner import make_plan, microbatch_counts
from shardwright.run.context import Context
from shardwright.run.machine import present_cluster
from shardwright.run.planning import placed_by_hand, profiles_of
from shardwright.run.profiler import Profiler
from shardwright.runtime.step_function import microbatch_sizes
from shardwright.tensorflow import _private
from shardwright.tensorflow.batch import Arguments
from shardwright.tensorflow.cost import ModelVariable, TimedStep, model_graph
from shardwright.tensorflow.pieces import Pieces
from shardwright.tensorflow.placement import place
from shardwright.tensorflow.program import Program
from shardwright.tensorflow.routes import routes_of
from shardwright.tensorflow.row_gradients import GradientSums
from shardwright.tensorflow.trace import Trace
from shardwright.tensorflow.units import UnitCalls, choose_units, layer_names, rank_of
from shardwright.tensorflow.variables import tf_variable, variables_by_name


@dataclass(slots=True)
class Planning:
    """Makes the plan, and programs by it.

    Attributes:
        sums: of gradients, that all pieces add to.
        lent: gives variables values for a while that have none yet.
    """

    context: Context
    model: Any
    sums: GradientSums
    lent: Callable[[Sequence[Any]], AbstractContextManager[None]]
    _names: dict[int, str] = field(default_factory=dict)
    # Ids of the handles of the model's variables.
    _handles: set[int] = field(default_factory=set)
    # Variables that have a home: their handle's id -> stage of the plan.
    _homes: dict[int, int] = field(default_factory=dict)

    def plan(self, arguments: Arguments, trace: Callable[[int], Trace]) -> Plan:
        """The plan for the first batch; collective over all ranks."""
        context = self.context
        assert context.reporter is not None
        if not any(arguments.split):
            raise PlanError(
                "the step function gets no tensor that can be cut into microbatches. Pass the batch as an "
                "argument."
            )
        samples = arguments.num_samples
        if samples is None:  # `Engine` has seen to it that the number of microbatches is set
            assert context.config.microbatches is not None
            samples = context.config.microbatches
        counts = microbatch_counts(samples, config=context.config, pipeline=context.mesh.pipeline)
        sizes = {m: microbatch_sizes(samples, m)[0] for m in counts}
        with context.reporter.phase("tracing the model"):
            steps = {m: self._described(trace(size), size) for m, size in sizes.items()}
        context.cluster = cluster = present_cluster(context)
        profiles = profiles_of(
            context,
            steps,
            # With one stage there is nothing to balance.
            profiler=self._profiler if context.mesh.pipeline > 1 else None,
            budget_s=context.config.measure_s,
        )
        layers = {name: layer for layer, name in self._layers()}
        with context.reporter.phase("planning"):
            return context.from_first_rank(
                lambda: make_plan(
                    {m: (step.graph, profiles[m]) for m, step in steps.items()},
                    cluster=cluster,
                    # What memory may require in the planner's choice, this front end cannot do yet.
                    config=Config.merge(context.config, {"offload_activations": False}),
                    mesh=context.mesh,
                    placement=placed_by_hand(
                        steps[counts[0]].graph.units,
                        lambda path: rank_of(layers[path]) if path in layers else None,
                        separator="/",
                    ),
                )
            )

    def _profiler(self) -> Profiler:
        framework = f"tensorflow {tf.__version__}"
        return Profiler(self.context, time_class=TimedStep.timing, framework=framework, units_alone=True)

    def check(self, plan: Plan, trace: Trace, size: int) -> None:
        """Refuses a plan that was made for another model, or another number of ranks."""
        plan.check(self._described(trace, size).graph, world_size=self.context.mesh.world_size)
        if any(stage.offload for stage in plan.stages):
            raise PlanError(
                "the plan has units under offload, which TensorFlow cannot do in this version. Make it anew "
                "with offload_activations false."
            )

    def program(self, plan: Plan, trace: Trace, *, given: Sequence[str] = ()) -> Program:
        units = self._units(trace)
        graph = trace.step_graph(units, is_of_model=self.is_of_model)
        graph = replace(graph, arguments=(*graph.arguments, *given))
        numbers = {id(handle): number for number, handle in enumerate(trace.variables)}
        held = {numbers[each]: stage for each, stage in self._homes.items() if each in numbers}
        again = {label for stage in plan.stages for label in stage.recompute}
        placement = place(
            graph,
            self._stages(plan, units),
            num_stages=len(plan.stages),
            held=held,
            recompute={call for call, label in enumerate(units.labels) if label in again},
            microbatches=plan.schedule.microbatches,
        )
        for number, stage in placement.owners.items():
            handle = trace.variables[number]
            if id(handle) in self._handles:
                self._homes.setdefault(id(handle), stage)
        routes = routes_of(graph, placement)
        return Program(
            trace=trace,
            graph=graph,
            placement=placement,
            routes=routes,
            pieces=Pieces(trace, routes.pieces, graph.sums, self.sums),
            stage_ranks=plan.stage_ranks,
            rank=self.context.pipeline_rank,
        )

    def holders(self, plan: Plan) -> list[tuple[Any, int]]:
        """The variables of the model that have a home, each with the pipeline rank that holds it."""
        return [
            (variable, plan.stage_ranks[stage])
            for variable in self.model.variables
            if (stage := self._homes.get(id(tf_variable(variable).handle))) is not None
        ]

    def is_of_model(self, variable: Any) -> bool:
        """Whether a variable belongs to the model, as it was when a program was last made."""
        return id(variable.handle) in self._handles

    # ---- inside ----

    def _units(self, trace: Trace) -> UnitCalls:
        # A model that is built when it is first called has its layers only now. Keras looks for them anew
        # whenever it is asked.
        self._names = layer_names(self.model)
        # Metrics are every rank's, as those that the model does not hold.
        own = _private.variables_without_metrics(self.model)
        self._handles = {id(tf_variable(variable).handle) for variable in own}
        self._refuse_hidden_layers(trace)
        stages_per_rank = self.context.config.virtual_stages or 1
        plan = self.context.plan
        wanted = len(plan.stages) if plan is not None else self.context.mesh.pipeline * stages_per_rank
        return choose_units(trace.recorder.calls, self._names, wanted=wanted)

    def _refuse_hidden_layers(self, trace: Trace) -> None:
        hidden = [self._names[id(each)] for each in trace.recorder.hidden if id(each) in self._names]
        if hidden and self.context.mesh.pipeline > 1:
            raise TraceError(
                f"layer {hidden[0]} is called inside of a loop, a condition or a function that XLA compiles, "
                "which is one operation of the step, so the layer can have no stage. Put the loop into a "
                "layer of its own, which is placed whole, or leave jit_compile out."
            )

    def _stages(self, plan: Plan, units: UnitCalls) -> Sequence[int]:
        """The stage of each unit call; one that the plan does not have goes with the call before it."""
        known = stage_of_label(plan)
        stages: list[int] = []
        for label in units.labels:
            stage = known.get(label, known.get(label.partition("#")[0]))
            stages.append(stage if stage is not None else (stages[-1] if stages else 0))
        return stages

    def _described(self, trace: Trace, size: int) -> TimedStep:
        units = self._units(trace)
        named = self._named_variables()
        step = trace.step_graph(units, is_of_model=self.is_of_model)
        graph = model_graph(
            step,
            units.labels,
            [type(layer).__name__ for layer in units.layers],
            {
                number: named[id(handle)]
                for number, handle in enumerate(trace.variables)
                if id(handle) in named
            },
            parameters=list(named.values()),
            batch_size=size,
        )
        return TimedStep(trace, step, graph, units.labels, self.lent)

    def _named_variables(self) -> dict[int, ModelVariable]:
        """The variables of the model by the id of their handle, under names that are unique."""
        trained = {id(tf_variable(variable)) for variable in self.model.trainable_variables}
        named: dict[int, ModelVariable] = {}
        for name, variable in variables_by_name(self.model).items():
            own = tf_variable(variable)
            shape = tuple(own.shape.as_list())
            num_bytes = int(own.shape.num_elements() * own.dtype.size)
            spec = TensorSpec(shape, own.dtype.name, num_bytes, requires_grad=id(own) in trained)
            named.setdefault(id(own.handle), ModelVariable(name, spec, trained=id(own) in trained))
        return named

    def _layers(self) -> list[tuple[Any, str]]:
        pending: list[Any] = [self.model]
        found: list[tuple[Any, str]] = []
        while pending:
            for layer in _private.layers_of(pending.pop()):
                if id(layer) in self._names and all(layer is not known for known, _ in found):
                    found.append((layer, self._names[id(layer)]))
                    pending.append(layer)
        return found
