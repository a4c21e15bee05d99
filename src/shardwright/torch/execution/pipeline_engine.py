"""Runs step functions over the stages of a pipeline."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwright.comm.joining.store import ValueBoard
from shardwright.errors import UsageError
from shardwright.run.context import Context, replica_board
from shardwright.torch.backward.loss_reduction import forms_of_batch
from shardwright.torch.backward.waiting_heads import heads_may_wait, mark_heads
from shardwright.torch.batch.batch import Batch, BatchGradients
from shardwright.torch.batch.step_output import BatchResult, Figures
from shardwright.torch.execution.agreement import (
    Agreement,
    TrainedModel,
    early_settings,
    hooks_between_steps,
    path_settings,
)
from shardwright.torch.execution.exchange import Outputs, Returned, Told
from shardwright.torch.execution.executor import BatchKind, Executor, RankBatch, number_of_parts
from shardwright.torch.execution.loss_weights import LossWeights
from shardwright.torch.execution.model_placement import ModelPlacement, PlacedModel
from shardwright.torch.execution.program_maker import KnownTrace, ProgramMaker
from shardwright.torch.interception.compiled_code import look_for_compiled_code
from shardwright.torch.interception.coroutine import model_calls_marked
from shardwright.torch.interception.glue import batch_running
from shardwright.torch.interception.library_code import patched_for_stages
from shardwright.torch.offload.offloading import offloading_of
from shardwright.torch.parameters.materialise import Materialiser
from shardwright.torch.parameters.synchronised_norms import SynchronisedNorms
from shardwright.torch.program.program import Program, generators_of
from shardwright.torch.python_state.attribute_watch import AttributeWatch
from shardwright.torch.randomness import python_random_kept
from shardwright.torch.replicas.reducer import (
    refuse_accumulation_hooks,
    refuse_gradient_hooks,
)
from shardwright.torch.script_collectives import over_replicas
from shardwright.torch.tracing.batch_statistics import BatchStatistics
from shardwright.torch.tracing.together import GlueBuffers

if TYPE_CHECKING:
    from shardwright.torch.measuring.planning import Planner

_ENGINES = itertools.count()
_KINDS_KEPT = 16


class PipelineEngine:
    """Runs step functions over the ranks that share a replica: its stages, and parts of their layers."""

    def __init__(
        self,
        context: Context,
        model: TrainedModel,
        planner: "Planner",
        materialiser: Materialiser,
    ):
        module = model.get_module()
        self._context = context
        self._model = model
        self._agreement = Agreement(context)
        self._attributes = AttributeWatch()
        self._programs = ProgramMaker(context, model, self._agreement, self._attributes)
        self._norms = SynchronisedNorms(context, module)
        self._heads = mark_heads(module, context.config.loss_chunks)
        self._statistics = BatchStatistics(prints=context.rank == 0)
        self._placement = ModelPlacement(
            context,
            model,
            planner,
            materialiser,
            agreement=self._agreement,
            programs=self._programs,
            offloading=offloading_of(context),
        )
        self._placed: PlacedModel | None = None
        self._kinds: dict[tuple[int, ...], BatchKind] = {}
        self._unchanged: Sequence[nn.Module] = ()
        self._failure = ""
        self._board: ValueBoard | None = None
        self._number = next(_ENGINES)
        self._told_of_losses: set[str] = set()

    def run(self, function: Callable[..., Any], batch: Batch, figures: Figures | None = None) -> BatchResult:
        """Runs one batch; collective over all ranks."""
        look_for_compiled_code()
        with self._norms.in_force(), patched_for_stages():
            try:
                return self._run(function, batch, figures)
            finally:
                self._attributes.step_ends()

    def _run(self, function: Callable[..., Any], batch: Batch, figures: Figures | None) -> BatchResult:
        context, module = self._context, self._model.get_module()
        modules = self._model.tree.modules
        self._refuse_changes(modules)
        hooks = hooks_between_steps(modules)
        settings = path_settings(modules, hooks)
        gradients = self._agreed(function, batch, settings)
        batch = gradients.batch
        placed, known = self._placed_for(function, batch)
        assert context.plan is not None
        parts = batch.split(number_of_parts(context, self._model, batch, context.plan.schedule.microbatches))
        path, attributes = (function, hooks, *settings.values()), self._attributes.step_begins(modules)
        programs = self._programs.of_batch(function, parts, path, attributes, known)
        common = self._kind(programs, placed)
        losses = LossWeights(
            self._model,
            function,
            parts,
            replicas=context.mesh.data,
            told=self._told_of_losses,
            tells=context.data_rank == 0 and context.tensor_rank == 0,
        )
        losses.check((program.trace.loss for program in common.distinct), tells=context.rank == 0)
        if common.trains:
            traced = [name for program in common.distinct for name in program.trace.graph.batch_statistics]
            self._statistics.training_begins(module, batch, microbatches=len(parts), traced=traced)
        self._agree_on_random_numbers(common)
        try:
            of_rank = self._rank_batch(common, function, parts, losses)
            with heads_may_wait() if self._heads else nullcontext():
                outputs, train, told = self._execute(placed, of_rank, gradients, figures)
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            if context.watch.blame is not None:
                context.watch.blame.stop()
            raise
        if common.changes_batch:
            for part, own in zip(parts, of_rank.parts, strict=True):
                part.take_changes(own)
        results, of_microbatches, loss_places = outputs.exchange(told.small)
        assert self._board is not None
        self._board.clear()
        stated = getattr(function, "loss_reduction", None)
        evaluated = [] if train else [program.trace.evaluated for program in programs]
        sums, doubts = forms_of_batch(evaluated, stated)
        return BatchResult(
            results=results,
            sums=sums,
            doubts=doubts,
            losses=losses.counted(of_microbatches) if train else None,
            loss_places=loss_places,
            weights=losses,
            samples=batch.num_samples or 0,
            tokens=batch.num_tokens,
            flops=common.flops,
            row=placed.executor.row.events,
            outside_s=placed.executor.outside_s,
            run_as=programs[0].replay.told if programs[0].replay is not None else "",
            memory=placed.executor.row.memory,
            host_copies=placed.executor.row.host_copies,
            schedule=common.schedule,
            figures=told.figures if common.trains and outputs.has_all_losses else None,
        )

    # ---- before the microbatches ----

    def _refuse_changes(self, modules: Sequence[nn.Module]) -> None:
        """Refuses a step after a failed one, and after changes of the model that ranks cannot follow."""
        if self._failure:
            raise UsageError(
                "an earlier step failed in its middle on this rank, and ranks have messages under way that "
                "nobody will take. Restart the script from a checkpoint. "
                f"The failure was {self._failure}"
            )
        if self._placed is not None:
            refuse_gradient_hooks(self._placed.several_stages)
            if modules is not self._unchanged:
                self._placed.refuse_changes(modules, rank=self._context.rank)
                self._unchanged = modules
        if self._context.mesh.data > 1:
            refuse_accumulation_hooks(modules[0], self._model.tree.parameters)

    def _agreed(
        self, function: Callable[..., Any], batch: Batch, settings: Mapping[str, Any]
    ) -> BatchGradients:
        """The batch of the first rank of the replica, whose settings must be those of this rank, too."""
        # In the first step the traces are compared, and tell more of models that are not the same.
        compared = settings if self._placed is not None else early_settings(settings)
        agreed = self._agreement.on_batch(batch, compared, function=function)
        gradients = BatchGradients(batch, agreed.to(self._context.device))
        if self._model.replicas.buffers is not None:
            self._model.replicas.buffers.agree()
        return gradients

    def _placed_for(
        self, function: Callable[..., Any], batch: Batch
    ) -> tuple[PlacedModel, KnownTrace | None]:
        """The placed model; in the first step it is placed now, with a trace of a microbatch."""
        if self._placed is not None:
            return self._placed, None
        with python_random_kept():  # units are timed
            self._placed, known = self._placement.make(function, batch)
            is_as_traced = self._model.placed(self._placed.residency)
        return self._placed, known if is_as_traced else None

    def _kind(self, programs: Sequence[Program], placed: PlacedModel) -> BatchKind:
        """What is known of batches with these programs, which live as long as it is kept."""
        key = tuple(map(id, programs))
        kind = self._kinds.get(key)
        if kind is None:
            kind = BatchKind(programs, placed.schedules)
            if all(program.trace.path is not None for program in programs):  # else they are never run again
                if len(self._kinds) == _KINDS_KEPT:
                    del self._kinds[next(iter(self._kinds))]
                self._kinds[key] = kind
        return kind

    def _agree_on_random_numbers(self, common: BatchKind) -> None:
        if common.draws:
            self._agreement.on_random_numbers(generators_of(common.programs))
        if common.python_draws:
            self._agreement.on_random_numbers_of_python()

    # ---- the microbatches ----

    def _rank_batch(
        self,
        common: BatchKind,
        function: Callable[..., Any],
        parts: Sequence[Batch],
        losses: LossWeights,
    ) -> RankBatch:
        context = self._context
        return RankBatch(
            rank=context.pipeline_rank,
            common=common,
            function=function,
            parts=[part.copied() for part in parts] if common.changes_batch else parts,
            board=self._board_of_batch(),
            losses=losses,
            buffers=GlueBuffers(self._model.get_module(), common.state) if common.state else None,
            watch_memory=context.reporter is not None and context.reporter.draws_next_step,
        )

    def _execute(
        self, placed: PlacedModel, batch: RankBatch, gradients: BatchGradients, figures: Figures | None
    ) -> tuple[Outputs, bool, Told]:
        """Computes all microbatches and sums what ranks share."""
        context, reducer = self._context, placed.reducer
        # Another replica may have a backward in its batch.
        reduces = batch.common.trains or (context.mesh.data > 1 and torch.is_grad_enabled())
        if reduces and reducer is not None:
            reducer.begin(overlap=batch.common.as_planned)
        returned = self._compute(placed.executor, batch)
        outputs = Outputs(context, returned, batch.programs)
        with_figures = figures is not None and placed.sums_nothing and self._model.scaling is None
        own: Sequence[float] = ()
        if figures is not None and with_figures:
            own = figures(placed.executor.row.events if batch.common.trains else None)
        told = outputs.refuse_other_paths(batch.losses, own)
        train = any(each.trains for each in returned)
        if batch.buffers is not None:
            assert context.groups.pipeline is not None
            batch.buffers.agree(context.pipeline_rank, tuple(context.pipeline_ranks), context.groups.pipeline)
        if train:
            gradients.hand_back(context.groups.pipeline)
        if reduces:
            found = reducer is not None and reducer.finish(loss_scale=self._model.loss_scale)
            train = train or self._agreement.on_any(found)
        if placed.tensor_group is not None:
            placed.tensor_group.sums.forget_dead()
            if placed.tensor_group.inner is not None:
                placed.tensor_group.inner.sums.forget_dead()
            placed.tensor_group.forget_gathered()
        return outputs, train, told

    def _compute(self, executor: Executor, batch: RankBatch) -> list[Returned]:
        # Where nothing was read in the traces, no module is watched for it.
        ends = batch.common.ends
        own = getattr(batch.function, "has_forward", False)
        module = self._model.get_module()
        with (
            batch_running(),
            over_replicas(sends=True),
            self._norms.synchronised(),
            self._model.replicas.saving(),
            model_calls_marked(module, but_its_own=own) if ends else nullcontext(),
        ):
            return executor.run(batch)

    def _board_of_batch(self) -> ValueBoard:
        """The board on which the ranks of the replica put up what the step function reads."""
        if self._board is None:
            self._board = replica_board(self._context, self._number)
        self._board.begin()
        return self._board

    @property
    def reduced(self) -> set[int]:
        """Parameters whose gradients are reduced."""
        reducer = None if self._placed is None else self._placed.reducer
        return set() if reducer is None else reducer.parameter_ids
