"""Runs step functions on a rank that holds the whole model, microbatch by microbatch."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.config import Config
from shardwright.planner import offloaded_bytes
from shardwright.quantities import format_bytes
from shardwright.run.context import Context
from shardwright.run.memory import memory_in_use
from shardwright.runtime.action_loop import note_begin
from shardwright.schedule import Action, Kind, Schedule, build_schedule
from shardwright.torch.backward.batch_data import WatchedData
from shardwright.torch.backward.loss_reduction import LossForm, Shadows, WatchedEvaluation, forms_of_batch
from shardwright.torch.backward.waiting_heads import heads_may_wait, mark_heads
from shardwright.torch.batch.batch import Batch, BatchGradients
from shardwright.torch.batch.step_output import BatchResult, Figures, detached, places_of
from shardwright.torch.counting.compiled_modules import compile_as_wished, compile_units
from shardwright.torch.execution.agreement import TrainedModel
from shardwright.torch.execution.executor import number_of_parts
from shardwright.torch.execution.loss_weights import LossWeights
from shardwright.torch.execution.plain_microbatch import PlainMicrobatch, keep_as_wished
from shardwright.torch.interception.compiled_code import nothing_compiled
from shardwright.torch.interception.coroutine import model_calls_marked
from shardwright.torch.interception.glue import (
    batch_running,
    intercept_calls,
    set_active_handler,
)
from shardwright.torch.interception.library_code import patched_backward
from shardwright.torch.offload.offloading import lasting_storages, offloading_of
from shardwright.torch.parameters.registration import agree_on_registration
from shardwright.torch.parameters.synchronised_norms import SynchronisedNorms
from shardwright.torch.pytorch.modules import range_named
from shardwright.torch.replicas.gradient_buckets import Reduced
from shardwright.torch.replicas.reducer import GradientReducer, refuse_accumulation_hooks
from shardwright.torch.replicas.replicas import broadcast
from shardwright.torch.tracing.batch_statistics import BatchStatistics
from shardwright.torch.tracing.traced_values import point_out_foreign_behind

if TYPE_CHECKING:
    from shardwright.torch.measuring.planning import Planner

log = logging.getLogger(__name__)


class SingleEngine:
    """Runs every microbatch on this rank, as a plain loop would."""

    def __init__(self, context: Context, model: TrainedModel, planner: "Planner | None" = None):
        self._context = context
        self._model = model
        self._planner = planner
        self._reducer: GradientReducer | None = None
        self._reduced: set[int] | None = None
        self._prepared = False
        self._was_cut = False
        self._told_of_losses: set[str] = set()
        self._looked_at: WeakSet[Callable[..., Any]] = WeakSet()
        self._data_looked_at: WeakSet[Callable[..., Any]] = WeakSet()
        # Of an evaluation: place in the result -> how it is reduced over samples.
        self._evaluated: WeakKeyDictionary[Callable[..., Any], dict[int, LossForm]] = WeakKeyDictionary()
        self._norms = SynchronisedNorms(context, model.get_module())
        self._heads = mark_heads(model.get_module(), context.config.loss_chunks)
        self._statistics = BatchStatistics(prints=context.rank == 0)
        self._offloading = offloading_of(context)
        self._offloaded: frozenset[nn.Module] = frozenset()
        self._order: Schedule | None = None
        if planner is None:
            _point_out_unused_limit(context)
        if context.groups.data is not None:
            self._share(context.groups.data)

    def run(self, function: Callable[..., Any], batch: Batch, figures: Figures | None = None) -> BatchResult:
        with self._norms.in_force():
            return self._run(function, batch)

    def _run(self, function: Callable[..., Any], batch: Batch) -> BatchResult:
        batch = batch.to(self._context.device)
        if torch.is_grad_enabled() and self._planner is not None and self._context.plan is None:
            self._plan(self._planner, function, batch)
        num_microbatches = self._context.config.microbatches or 1
        if self._was_cut:
            num_microbatches = number_of_parts(self._context, self._model, batch, num_microbatches)
        gradients = None
        if num_microbatches > 1 and torch.is_grad_enabled():  # what is behind inputs can be gone through once
            gradients = BatchGradients(batch, batch)
            batch = gradients.batch
            self._look(function, *(each for each in gradients.originals if each is not None), is_all=False)
        parts = batch.split(num_microbatches)
        self._was_cut = True
        if torch.is_grad_enabled():
            self._prepare(function, batch, parts)
        if self._context.groups.data is not None:
            refuse_accumulation_hooks(self._model.get_module(), self._model.tree.parameters)
            self._prepare_replicas(self._context.groups.data)
        losses = LossWeights(
            self._model,
            function,
            parts,
            replicas=self._context.mesh.data,
            told=self._told_of_losses,
            tells=self._context.rank == 0,
        )
        loop = _Loop(losses, goes_on=gradients is not None and bool(gradients.originals))
        self._offloading.begin_batch()
        lasting = self._lasting(parts)
        try:
            with (
                batch_running(),
                self._norms.synchronised(),
                self._model.replicas.saving(),
                patched_backward(),
                heads_may_wait() if self._heads else nullcontext(),
            ):
                for part in parts:
                    self._run_microbatch(function, part, loop, lasting)
        finally:
            self._offloading.end_batch()
        trains = bool(loop.losses)
        if gradients is not None:  # before these are reduced: the model's parameters may stand behind inputs
            gradients.hand_back(None, is_shared=False)
        if self._reducer is not None and (trains or torch.is_grad_enabled()):
            if not trains:
                self._reducer.begin()  # another replica may have a backward in its batch
            trains = self._reducer.finish(loss_scale=self._model.loss_scale) or trains
        sums, doubts = (frozenset[int](), {}) if trains else self._of_batch(function)
        return BatchResult(
            results=[detached(result) for result in loop.results],
            sums=sums,
            doubts=doubts,
            losses=losses.counted(loop.all_losses) if trains else None,
            loss_places=loop.loss_places,
            weights=losses,
            samples=batch.num_samples or 0,
            tokens=batch.num_tokens,
            row=loop.row,
            memory=loop.memory,
            host_copies=self._offloading.copies() if self._draws else (),
            schedule=self._schedule(num_microbatches) if len(loop.losses) == num_microbatches else None,
        )

    @property
    def _draws(self) -> bool:
        """Whether the timeline of the step will be asked for."""
        reporter = self._context.reporter
        return reporter is not None and reporter.draws_next_step

    def _lasting(self, parts: Sequence[Batch]) -> frozenset[int] | None:
        """The storages that are there during the whole batch; None where nothing is offloaded."""
        if not self._offloaded or not torch.is_grad_enabled():
            return None
        arguments = (part.arguments for part in parts)
        return frozenset(lasting_storages(self._model.get_module(), arguments))

    def _schedule(self, num_microbatches: int) -> Schedule:
        """The order in which a plain loop works, as a schedule of one stage."""
        if self._order is None or self._order.num_microbatches != num_microbatches:
            schedule = build_schedule("1f1b", stage_ranks=(0,), num_microbatches=num_microbatches)
            self._order = schedule.with_host_copies({0} if self._offloaded else ())
        return self._order

    def _prepare(self, function: Callable[..., Any], batch: Batch, parts: Sequence[Batch]) -> None:
        """Looks at a batch that may train, before its first microbatch."""
        module = self._model.get_module()
        self._statistics.training_begins(module, batch, microbatches=len(parts))
        if not self._prepared:
            kept = keep_as_wished(self._context, module, function, parts[0])
            if self._context.plan is not None:
                compile_as_wished(module, self._context, self._context.plan)
            # What recomputes units, or offloads what they keep, is around compiled code, and not in it.
            compile_units(module, kept.units, alone=True)
            self._offloaded = frozenset(map(module.get_submodule, kept.offloaded))
            self._order = None
            if self._context.plan is not None:
                self._offloading.reserve(*offloaded_bytes(self._context.plan))
            for unit in self._offloaded:
                intercept_calls(unit)
            self._prepared = True

    def _run_microbatch(
        self,
        function: Callable[..., Any],
        part: Batch,
        loop: "_Loop",
        lasting: frozenset[int] | None,
    ) -> None:
        """Calls the step function with one microbatch; its backward comes back to the handler."""
        index = len(loop.results)
        offload = None
        is_first = index == 0 and loop.weights.is_split
        is_new = is_first and function not in self._evaluated
        trains = torch.is_grad_enabled()
        watch = WatchedEvaluation() if is_new and not trains else None
        looks = is_first and trains and function not in self._data_looked_at
        watched = WatchedData(part.num_samples or 1) if looks else None
        looking = watch or watched
        loop.weights.data = None if watched is None else watched.data
        if lasting is not None:
            offload = self._offloading.stage(0, index, lambda: lasting)
        handler = PlainMicrobatch(
            partial(loop.weights.factor, index),
            self._reducer,
            first=not loop.losses,
            last=index == len(loop.weights.shares) - 1 and not loop.goes_on,
            in_use=partial(memory_in_use, self._context.device) if self._draws else None,
            look=partial(self._look, function) if index == 0 else None,
            offload=offload,
            offloaded=self._offloaded,
            shadows=None if watch is None else watch.shadows,
        )
        if watched is not None:
            watched.is_behind_backward = lambda: handler.backward_s != (0.0, 0.0)
        args, kwargs = part.arguments
        note_begin(Kind.FORWARD, index)
        begun_s = time.perf_counter()
        before = set_active_handler(handler)
        try:
            with (
                range_named(f"microbatch {index}"),
                nullcontext() if looking is None else self._looking(looking),
            ):
                result = function(*args, **kwargs)
        except BaseException:
            if self._reducer is not None:
                self._reducer.abort()
            raise
        finally:
            set_active_handler(before)
        if handler.loss is not None:
            if is_first:
                self._data_looked_at.add(function)
        elif is_new:
            shadows = Shadows(lambda item: item) if watch is None else watch.shadows
            self._evaluated[function] = shadows.forms(result, samples=part.num_samples or 1)
        loop.microbatch_done(result, handler, begun_s=begun_s)

    @contextmanager
    def _looking(self, watch: WatchedEvaluation | WatchedData) -> Iterator[None]:
        """Surrounds a microbatch that is looked at: compiled code would hide what it does."""
        with model_calls_marked(self._model.get_module()), nothing_compiled(), watch:
            yield

    def _of_batch(self, function: Callable[..., Any]) -> tuple[frozenset[int], dict[int, str]]:
        """See `forms_of_batch`."""
        known = [self._evaluated[function]] if function in self._evaluated else []
        return forms_of_batch(known, getattr(function, "loss_reduction", None))

    def _look(self, function: Callable[..., Any], *behind: Tensor, is_all: bool = True) -> None:
        """Looks behind a loss, or inputs, the first time, for what replicas cannot train together."""
        if self._context.groups.data is not None and function not in self._looked_at:
            if is_all:
                self._looked_at.add(function)
            sharding = self._model.replicas.sharding
            shared = [] if sharding is None else [each.holder for each in sharding.parameters.values()]
            for tensor in behind:
                point_out_foreign_behind(tensor, [*self._model.get_module().parameters(), *shared])

    def _plan(self, planner: "Planner", function: Callable[..., Any], batch: Batch) -> None:
        """Makes a plan, and follows it; before parameters are shared, so that units can be timed."""
        context = self._context
        plan, _ = planner(function, batch)
        context.plan = plan
        context.config = Config.merge(context.config, {"microbatches": plan.schedule.microbatches})
        assert context.reporter is not None
        context.reporter.plan_made(plan)

    @property
    def has_shared(self) -> bool:
        """Whether this rank keeps just what it trains: with replicas, after the first step."""
        return self._context.groups.data is None or self._reduced is not None

    @property
    def reduced(self) -> set[int]:
        """Parameters whose gradients are reduced."""
        return set() if self._reducer is None else self._reducer.parameter_ids

    def _prepare_replicas(self, group: dist.ProcessGroup) -> None:
        """Gives all replicas the values of the first, and reduces their gradients.

        Before the first batch, and again where the script of any replica has given the model other parameters
        since.
        """
        module = self._model.get_module()
        present = set(map(id, self._model.tree.parameters))
        buffers = self._model.replicas.buffers
        if buffers is not None and not buffers.agree(other_parameters=present != self._reduced):
            return
        agree_on_registration(module, self._context)  # scripts may have changed it since it was wrapped
        self._share(group)
        self._model.replicas.shard(dict(module.named_parameters()))
        members = [Reduced(parameter, frozenset({0}), group) for parameter in module.parameters()]
        self._reducer, self._reduced = self._model.replicas.make_reducer(members), present
        self._model.settle()
        self._model.replicas.begin_with_buffers(self._model.tree)

    def _share(self, group: dist.ProcessGroup) -> None:
        """Gives all replicas the values of the first."""
        first = self._context.holders[0]
        for tensor in (*self._model.get_module().parameters(), *self._model.get_module().buffers()):
            broadcast(tensor, first, group)


def _point_out_unused_limit(context: Context) -> None:
    """Says that nothing keeps to a limit for which nothing is planned."""
    limit = context.config.memory_limit
    if limit is not None and context.plan is None and context.mesh.shard == 1 and context.rank == 0:
        log.warning(
            "memory_limit is %s, but nothing is planned where each rank has the whole model, so that nothing "
            "keeps to it. Set plan_one_stage to have it checked.",
            format_bytes(limit),
        )


@dataclass(slots=True)
class _Loop:
    """The results of a batch's microbatches so far: see `BatchResult`."""

    weights: LossWeights
    goes_on: bool  # gradients of inputs follow
    results: list[Any] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    all_losses: list[Tensor | None] = field(default_factory=list)
    loss_places: list[tuple[int, ...]] = field(default_factory=list)
    row: list[tuple[Action, float, float, float]] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    def microbatch_done(self, result: Any, handler: PlainMicrobatch, *, begun_s: float) -> None:
        index = len(self.results)
        self.results.append(result)
        self.all_losses.append(handler.loss)
        self.loss_places.append(() if handler.loss is None else places_of(handler.loss, result))
        if handler.loss is not None:
            self.losses.append(handler.loss)
            begin_s, end_s = handler.backward_s
            forward_s, backward_s = handler.waited_s
            self.row.append((Action(Kind.FORWARD, 0, index), begun_s, begin_s, forward_s))
            self.row.append((Action(Kind.BACKWARD, 0, index), begin_s, end_s, backward_s))
            self.memory += handler.memory
