"""Runs step functions over the stages of a pipeline."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwright.comm.trust.value_board import ValueBoard
from shardwright.errors import UsageError
from shardwright.planner import stage_costs_of
from shardwright.runtime.assignment import assign
from shardwright.runtime.batch_programs import check_one_order, homes_of_buffers, merged_edges
from shardwright.runtime.batch_schedules import BatchSchedules
from shardwright.schedule import Schedule, splits_backward
from shardwright.torch.backward.activation_checkpointing import marked_inside
from shardwright.torch.backward.split_backward import split_modules
from shardwright.torch.batch.batch import Batch
from shardwright.torch.batch.batch_gradients import BatchGradients
from shardwright.torch.batch.batch_result import BatchResult
from shardwright.torch.execution.agreement import (
    Agreement,
    early_settings,
    hooks_between_steps,
    path_settings,
)
from shardwright.torch.execution.exchange import Returned, exchange_outputs, refuse_other_paths
from shardwright.torch.execution.executor import Executor
from shardwright.torch.execution.program_maker import KnownTrace, ProgramMaker
from shardwright.torch.execution.read_costs import ReadCosts
from shardwright.torch.execution.trained_model import TrainedModel
from shardwright.torch.interception.backward_calls import backward_intercepted
from shardwright.torch.interception.checkpoint_generators import generators_saved_in_turn
from shardwright.torch.interception.custom_functions import custom_functions_intercepted
from shardwright.torch.interception.distributions import distributions_unchecked
from shardwright.torch.interception.glue import batch_running
from shardwright.torch.interception.inference_mode import inference_mode_as_no_grad
from shardwright.torch.interception.model_calls import model_calls_marked
from shardwright.torch.interception.padded_encoder import padded_encoders
from shardwright.torch.interception.scripted_code import scripted_functions_intercepted
from shardwright.torch.parameters.materialise import Materialiser
from shardwright.torch.parameters.registration import agree_on_registration
from shardwright.torch.parameters.residency import Residency, release_remote
from shardwright.torch.parameters.synchronised_norms import SynchronisedNorms
from shardwright.torch.parameters.unit_map import refuse_unknown_units
from shardwright.torch.program.program import Program, generators_of
from shardwright.torch.python_state.attribute_watch import AttributeWatch
from shardwright.torch.pytorch.module_tree import all_modules
from shardwright.torch.randomness.python_random import python_random_kept
from shardwright.torch.replicas.plan_in_effect import (
    SharingGroups,
    reduced_parameters,
    synchronise,
)
from shardwright.torch.replicas.reducer import (
    GradientReducer,
    refuse_accumulation_hooks,
    refuse_gradient_hooks,
)
from shardwright.torch.replicas.replica_buffers import ReplicaBuffers
from shardwright.torch.run.context import Context
from shardwright.torch.run.replica_board import replica_board
from shardwright.torch.script_collectives.replica_collectives import over_replicas
from shardwright.torch.tracing.batch_statistics import BatchStatistics
from shardwright.torch.tracing.glue_buffers import GlueBuffers

if TYPE_CHECKING:
    from shardwright.torch.measuring.planning import Planner

__all__ = ["PipelineEngine"]


_ENGINES = itertools.count()


class PipelineEngine:
    """Runs step functions over the stages of a replica.

    Args:
        context: the run; its plan is set by the first call of `run` if none was given.
        model: the wrapped model.
        planner: makes the plan from the first batch.
        materialiser: gives memory to a model on the meta device.
    """

    def __init__(
        self,
        context: Context,
        model: TrainedModel,
        planner: "Planner",
        materialiser: Materialiser,
    ):
        self._context = context
        self._model = model
        self._planner = planner
        self._materialiser = materialiser
        self._agreement = Agreement(context)
        self._attributes = AttributeWatch(model.get_module())
        self._programs = ProgramMaker(context, model, self._agreement, self._attributes)
        self._schedules: BatchSchedules | None = None
        self._residency: Residency | None = None
        self._groups = SharingGroups(context)
        self._several_stages: dict[str, nn.Parameter] = {}
        self._replica_buffers: ReplicaBuffers | None = None
        self._parameters: frozenset[int] | None = None
        self._failure = ""
        self._board: ValueBoard | None = None
        self._reads = ReadCosts(context)
        self._number = next(_ENGINES)
        self._norms = SynchronisedNorms(context, model.get_module())
        self._statistics = BatchStatistics(context.config, prints=context.rank == 0)
        self.reducer: GradientReducer | None = None
        self.executor: Executor | None = None

    def run(self, function: Callable[..., Any], batch: Batch) -> BatchResult:
        """Runs one batch; collective over all ranks."""
        with (
            self._norms.in_force(),
            inference_mode_as_no_grad(),
            custom_functions_intercepted(),
            scripted_functions_intercepted(),
            backward_intercepted(),
            generators_saved_in_turn(),
            padded_encoders(),
            distributions_unchecked(),
        ):
            try:
                return self._run(function, batch)
            finally:
                self._attributes.step_ends()

    def _run(self, function: Callable[..., Any], batch: Batch) -> BatchResult:
        context, module = self._context, self._model.get_module()
        self._refuse_after_failure()
        refuse_gradient_hooks(self._several_stages)
        if context.mesh.data > 1:
            refuse_accumulation_hooks(module)
        self._refuse_other_parameters()
        hooks = hooks_between_steps(module)
        settings = path_settings(module, hooks)
        # In the first step the traces are compared, and tell more of models that are not the same.
        compared = settings if self._residency is not None else early_settings(settings)
        agreed = self._agreement.on_batch(batch, compared, function=function)
        gradients = BatchGradients(batch, agreed.to(context.device))
        batch = gradients.batch
        if self._replica_buffers is not None:
            self._replica_buffers.agree_on_what_scripts_set()
        known = None
        if self._residency is None:
            with python_random_kept():  # units are timed
                known = self._place(function, batch)
        assert context.plan is not None
        parts = batch.split(context.plan.schedule.microbatches)
        path, attributes = (function, hooks, *settings.values()), self._attributes.step_begins()
        programs = self._programs.of_batch(function, parts, path, attributes, known)
        check_one_order(programs)
        if _trains(programs):
            self._statistics.training_begins(module, batch, microbatches=len(parts))
        assert self._schedules is not None
        schedule = self._schedules.of_batch(programs, trains=_trains(programs))
        if any(program.draws for program in programs):
            self._agreement.on_random_numbers(generators_of(programs))
        if any(program.draws_of_python for program in programs):
            self._agreement.on_random_numbers_of_python()
        changes_batch = any(program.changes_batch for program in programs)
        own = [part.copied() for part in parts] if changes_batch else parts
        state = homes_of_buffers(programs)
        buffers = GlueBuffers(module, state) if state else None
        try:
            returned, train = self._execute(schedule, programs, function, own, gradients, buffers)
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise
        if changes_batch:
            for part, changed in zip(parts, own, strict=True):
                part.take_changes(changed)
        results, losses = exchange_outputs(context, returned, programs)
        assert self._board is not None
        self._reads.tell(function, programs, self._board)
        self._board.clear()
        assert self.executor is not None
        return BatchResult(
            results=results,
            losses=losses if train else None,
            samples=batch.num_samples or 0,
            tokens=batch.num_tokens,
            flops=sum(program.flops for program in programs),
            row=self.executor.row.events,
            memory=self.executor.row.memory,
            schedule=schedule,
            edges=merged_edges(programs),
        )

    def _execute(
        self,
        schedule: Schedule,
        programs: list[Program],
        function: Callable[..., Any],
        parts: list[Batch],
        gradients: BatchGradients,
        buffers: GlueBuffers | None,
    ) -> tuple[list[Returned], bool]:
        """Computes all microbatches and sums what ranks share.

        Returns:
            What each microbatch returned, and whether any rank of any replica has trained.
        """
        context = self._context
        assert self.executor is not None
        train = _trains(programs)
        # Another replica may have a backward in its batch.
        reduces = train or (context.mesh.data > 1 and torch.is_grad_enabled())
        if reduces and self.reducer is not None:
            self.reducer.begin(overlap=all(program.as_planned for program in programs))
        # Where nothing was read in the traces, no module is watched for it.
        ends = any(program.ends for program in programs)
        own = getattr(function, "has_forward", False)
        module = self._model.get_module()
        marked = model_calls_marked(module, but_its_own=own) if ends else nullcontext()
        with (
            batch_running(),
            over_replicas(sends=True),
            self._norms.synchronised(),
            self._model.replicas.saving(),
            marked,
        ):
            returned = self.executor.run(
                schedule,
                context.pipeline_rank,
                programs,
                function,
                parts,
                loss_scale=self._model.loss_scale
                / (len(parts) if self._model.average_grads_across_microbatches else 1),
                model=self._model.get_module(),
                buffers=buffers,
                watch_memory=context.reporter is not None and context.reporter.draws_next_step,
                board=self._board_of_batch(),
            )
        refuse_other_paths(context, returned, programs)
        train = any(each.trains for each in returned)
        if buffers is not None:
            assert context.pipeline_group is not None
            buffers.agree(context.pipeline_rank, tuple(context.pipeline_ranks), context.pipeline_group)
        if train:
            gradients.hand_back(context.pipeline_group)
        if reduces:
            found = self.reducer is not None and self.reducer.finish(loss_scale=self._model.loss_scale)
            train = train or self._agreement.on_any(found)
        if self._replica_buffers is not None:
            self._replica_buffers.agree()
        return returned, train

    def _board_of_batch(self) -> ValueBoard:
        """Where the ranks of the replica put up what the step function reads."""
        if self._board is None:
            self._board = replica_board(self._context, self._number)
        self._board.begin()
        return self._board

    @property
    def reduced(self) -> set[int]:
        """Parameters whose gradients are reduced."""
        return set() if self.reducer is None else self.reducer.parameter_ids

    def _refuse_after_failure(self) -> None:
        if self._failure:
            raise UsageError(
                "an earlier step failed in its middle on this rank, and ranks have messages under way that "
                "nobody will take. Restart the script from a checkpoint. "
                f"The failure was {self._failure}"
            )

    def _refuse_other_parameters(self) -> None:
        module, known = self._model.get_module(), self._parameters
        if known is not None and _parameter_ids(module) != known:
            found = next((n for n, p in module.named_parameters() if id(p) not in known), "one is gone")
            raise UsageError(
                "parameters were added to the model, or replaced, after it was spread over stages and "
                f"replicas, which know nothing of them: {found}, on rank {self._context.rank}. Change the "
                "model before the first step."
            )

    # ---- the first step ----

    def _place(self, function: Callable[..., Any], batch: Batch) -> KnownTrace | None:
        """Places the units.

        Returns:
            The trace by which they were placed; None where the model may be another one since.
        """
        context, module = self._context, self._model.get_module()
        assert context.reporter is not None
        agree_on_registration(module, context)  # scripts may have changed it since it was wrapped
        self._materialiser.agree_on_seed()
        self._agreement.on_first_trace()
        trace = None
        if context.plan is None:
            context.plan, trace = self._planner(function, batch)
        plan = context.plan
        context.reporter.plan_made(plan)
        self._schedules = BatchSchedules(plan.schedule, stage_costs_of(plan))
        names = list(dict.fromkeys(label.split("#")[0] for label in plan.model.units))
        refuse_unknown_units(module, names)
        units = self._programs.set_units(names)
        self._materialiser.buffers_outside(units)
        # Before the trace, in which a module around several units must not recompute itself.
        marked = marked_inside(module, set(units.units))
        part = batch.split(plan.schedule.microbatches)[0]
        # All ranks or none: they agree on where it ends. (Another model has other units than the plan.)
        again = trace is None or bool(marked) or set(trace.unit_names) != set(names)
        if self._agreement.on_any(again) or trace is None:
            trace = self._programs.trace(function, part)
        self._agreement.on_trace(trace)
        self._statistics.note(trace.graph.batch_statistics)
        plan.check(trace.graph, world_size=context.mesh.world_size)
        assignment = assign(trace.graph, plan)
        residency = Residency.of(trace.graph, assignment.homes, assignment.stage_ranks)
        unchanged = self._hold(residency, plan.stage_ranks)
        self.executor = Executor(
            context.transport,  # type: ignore[arg-type]
            device=context.device,
            on_backward=None if self.reducer is None else self.reducer.on_backward,
        )
        units = self._programs.units
        recompute = frozenset(
            node.label
            for node in trace.graph.nodes
            if node.kind == "unit" and id(units.modules[node.name]) in marked
        ).union(*(stage.recompute for stage in plan.stages))
        if splits_backward(plan.schedule.kind):
            for unit in units.modules.values():
                split_modules(unit)
        self._residency = residency
        self._programs.placed(residency, recompute)
        if context.data_group is not None:
            ranks = context.mesh.group("dp", context.rank)
            self._replica_buffers = ReplicaBuffers(
                module, context.data_group, ranks=ranks, rank=context.rank, device=context.device
            )
            self._replica_buffers.note()
        if context.mesh.world_size > 1:
            self._parameters = _parameter_ids(module)
        unchanged = self._model.placed(residency) and unchanged
        return KnownTrace(part, trace, assignment) if unchanged else None

    def _hold(self, residency: Residency, stage_ranks: tuple[int, ...]) -> bool:
        """Keeps what this rank holds, gives up the rest, and makes holders of one parameter agree.

        Returns:
            Whether all that is left is as it was: no values came from others, or from the user's functions.
        """
        context, module, units = self._context, self._model.get_module(), self._programs.units
        rank = context.pipeline_rank
        self._groups.make([tuple(ranks) for ranks in residency.ranks.values() if len(ranks) > 1])
        held = set(residency.held_by(rank))
        was_whole = not self._materialiser.waits
        release_remote(
            module,
            residency,
            units.parameters,
            rank=rank,
            world_ranks=context.pipeline_ranks,
            device=context.device,
        )
        alone = {name for name in held if residency.ranks[name] == (rank,)}
        parameters = dict(module.named_parameters())
        waiting = self._model.replicas.filled_when_shared({n: p for n, p in parameters.items() if n in alone})
        self._materialiser.named(held - waiting, units)
        changed = synchronise(residency, _first_named(module), self._groups, rank=rank)
        units = self._programs.note_new_tensors()
        parameters = {
            n: p
            for n, p in _first_named(module).items()
            if isinstance(p, nn.Parameter) and (not p.is_meta or n in waiting)
        }
        self._several_stages = {n: p for n, p in parameters.items() if len(residency.stages[n]) > 1}
        self._model.replicas.shard({n: p for n, p in parameters.items() if n in alone})
        aliased = {name for name, spec in units.specs.items() if spec.aliases}
        members = reduced_parameters(
            residency, parameters, aliased, self._groups, stage_ranks=stage_ranks, rank=rank
        )
        self.reducer = self._model.replicas.make_reducer(members) if members else None
        return was_whole and not changed


def _parameter_ids(module: nn.Module) -> frozenset[int]:
    return frozenset(id(p) for sub in all_modules(module) for p in sub._parameters.values() if p is not None)


def _trains(programs: list[Program]) -> bool:
    return any(program.backward_at is not None for program in programs)


def _first_named(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by their first name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
