"""Calls of a wrapped model in steps, and outside of them.

::

    ranks meet ──► rows of shared parameters come ──► the engine runs the batch ──► rows go ──► the step ends
"""

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch.utils._pytree import tree_map_only

from shardwright.comm.joining.process_group import groups_in_doubt
from shardwright.comm.message_names import Purpose
from shardwright.errors import PeerLostError, UsageError
from shardwright.run.context import Context, context
from shardwright.run.joint_calls import (
    STEP,
    call_together,
    first_cause_named,
    meet,
    out_of_data,
    ranks_with_the_model,
)
from shardwright.run.memory import OwnCores, give_back_freed_memory
from shardwright.torch.batch.batch import Arguments, Batch
from shardwright.torch.batch.batch_broadcast import BatchBroadcast
from shardwright.torch.batch.splitter import Splitter
from shardwright.torch.batch.step_output import BatchResult, Figures, StepEngine
from shardwright.torch.execution.agreement import TrainedModel
from shardwright.torch.execution.loss_weights import WeighedGradients
from shardwright.torch.interception.backward_calls import (
    BackwardWatch,
    refuse_backward_outside,
    refuse_updates_inside_steps,
)
from shardwright.torch.interception.step_code import ReadingStep, point_out_in_run
from shardwright.torch.loss_scale import scaling_begins
from shardwright.torch.pytorch.modules import line_of, stacklevel_of_user, user_line
from shardwright.torch.step_end.step_end import StepEnd


class CallOutside:
    """Runs a model on a batch that is not cut, so that each rank gets what it returns in one process.

    Stages work one after the other. A step function has them work at once, on microbatches.
    """

    def __init__(self, forward: Callable[..., Any]):
        def call_of_the_model(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        self._function = ReadingStep(call_of_the_model)
        self._broadcast: BatchBroadcast | None = None

    def agreed(self, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> Arguments:
        """The arguments of the replica's first rank, for a model that every rank still has as a whole."""
        current = context()
        with first_cause_named(current):
            meet("a call of the model", ranks_with_the_model())
        if current.links.replica is None:
            return tuple(args), dict(kwargs)
        if self._broadcast is None:
            self._broadcast = BatchBroadcast(
                current.links.replica, source=current.replica_ranks[0], device=current.device
            )
        received = self._broadcast((tuple(args), dict(kwargs)))
        return received if current.rank == current.replica_ranks[0] else _moved(received, device)

    def run(
        self,
        run_step: Callable[[Callable[..., Any], Batch], BatchResult],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Runs the model; collective over the ranks of the replica."""
        batch = Batch((tuple(args), dict(kwargs)), Splitter(in_one=True))
        return run_step(self._function, batch).results[0]


def _moved(arguments: Arguments, device: torch.device) -> Arguments:
    moved: Arguments = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), arguments)
    return moved


def refuse_call(*, trains: bool, has_values: bool) -> None:
    """Refuses calls outside of step functions that cannot be evaluations."""
    if trains:
        raise UsageError(
            f"{user_line()}: the model is spread over ranks, so what trains it is called inside a function "
            "decorated with @sw.step. For an evaluation, call the model under torch.no_grad(), on all ranks."
        )
    if not has_values:
        raise UsageError(
            f"{user_line()}: the model is on the meta device, and gets its values in the first step, which "
            "decides what each rank has. Call it after the first training step."
        )


class Steps:
    """The steps of a model.

    Attributes:
        called_to_train: the step function has called the model in training mode, with gradients.
    """

    def __init__(
        self,
        context: Context,
        model: TrainedModel,
        engine: StepEngine,
        step_end: StepEnd,
        *,
        gives_back: bool,
    ):
        self._context = context
        self._model = model
        self._engine = engine
        self._step_end = step_end
        self._gives_back = gives_back
        self._cores = OwnCores(context)
        self._trained_by: WeakSet[Callable[..., Any]] = WeakSet()  # step functions that have called backward
        self._run_before: WeakSet[Callable[..., Any]] = WeakSet()
        self._looked_at: WeakSet[Callable[..., Any]] = WeakSet()  # for numbers of optimizers that they set
        self._pointed_out = False
        self._weighed = WeighedGradients(model)
        self.called_to_train = False
        self.outside = BackwardWatch(refuse_backward_outside)

    def run(self, function: Callable[..., Any], batch: Batch) -> BatchResult:
        try:
            return self._run(function, batch)
        except PeerLostError as error:
            told = out_of_data(self._context, error) if torch.is_grad_enabled() else error
            if told is error:
                raise
            raise told from error

    def _run(self, function: Any, batch: Batch) -> BatchResult:
        current = self._context
        begun_s = time.perf_counter()
        self.called_to_train = False
        if current.reporter is not None:
            current.reporter.calls_steps = True
        scaling_begins()
        self.outside.step_begins()
        partitioned = self._model.partitioned
        # The first step measures and plans, with all cores; it frees what other ranks keep.
        plans = not partitioned or (current.config.plan_one_stage and current.plan is None)
        own_cores = nullcontext() if plans else self._cores.in_force()
        hint = ""
        if function not in self._trained_by:
            hint = _hint_for_evaluations(current)
        if function not in self._run_before:
            self._run_before.add(function)
            refuse_updates_inside_steps(current.cleanup)
        # A step in which a state is loaded changes numbers itself.
        looks = function not in self._looked_at and not self._model.waits_to_settle
        numbers = self._step_end.numbers.now() if looks else {}
        together = call_together(_called(function), _ranks_of_a_step(current), hint=hint)
        if partitioned and self._gives_back:
            self._gives_back = False
            give_back_freed_memory()
        with first_cause_named(current), own_cores, together:
            if torch.is_grad_enabled() and current.mesh.data > 1 and not self._model.labels_of_batch:
                self._model.labels_of_batch = self._labels_of(batch)
            with self._weighed.around(function):
                try:
                    result = self._run_batch(function, batch, self._step_end.figures_of(batch))
                except BaseException as error:
                    groups_in_doubt()
                    if isinstance(error, Exception):
                        point_out_in_run(error, self._model.get_module())
                    raise
                if result.losses is not None:
                    self._trained_by.add(function)
                    if looks:
                        self._looked_at.add(function)
                        self._refuse_changed_numbers(function, numbers)
                    total = self._step_end.come(result, batch, begun_s=begun_s)
                    if result.weights is not None:
                        self._weighed.divide(function, result.weights, total)
            if result.losses is None and self.called_to_train and current.rank == 0:
                self._point_out_missing_backward(function)
        return result

    def _refuse_changed_numbers(self, function: Any, before: Mapping[Any, Any]) -> None:
        """Refuses a step function that sets numbers of an optimizer, such as its learning rate."""
        now = self._step_end.numbers.now()
        changed = next((key for key, value in before.items() if now.get(key) != value), None)
        if changed is not None:
            raise UsageError(
                f"{line_of(function)}: {changed[-1]} of a parameter group of the optimizer is changed inside "
                "a step function, which runs once for each microbatch and trace. Set it in the training loop."
            )

    def _labels_of(self, batch: Batch) -> float:
        """What weighs losses of a first batch, see `LossWeights`; collective over all ranks."""
        world = self._context.links.world
        assert world is not None
        labels = max(batch.num_tokens or 0, batch.num_samples or 0, 1)
        here = torch.tensor([labels], dtype=torch.float64, device=self._context.device)
        return 2.0 ** round(math.log2(world.gather(here, Purpose.FIGURES).max().item()))

    def _run_batch(self, function: Callable[..., Any], batch: Batch, figures: Figures) -> BatchResult:
        """Runs a batch, with all rows of shared parameters and without the gradients of earlier batches."""
        replicas, scaling, engine = self._model.replicas, self._model.scaling, self._engine
        try:
            if replicas.sharding is not None:
                replicas.sharding.to_whole()
            if scaling is not None:
                scaling.begin(engine.reduced)
            result = engine.run(function, batch, figures)
            if scaling is not None:
                scaling.finish(engine.reduced, replicas.sums_of_rows, trained=result.losses is not None)
        except BaseException:
            if scaling is not None:
                scaling.leave()
            if replicas.sharding is not None:
                replicas.sharding.leave()
            raise
        if replicas.sharding is not None:
            replicas.sharding.to_sharded()
        return result

    def _point_out_missing_backward(self, function: Callable[..., Any]) -> None:
        """Warns once of a step that looks like training and trains nothing."""
        if self._pointed_out or function in self._trained_by:
            return
        if not any(p.requires_grad for p in self._model.get_module().parameters()):
            return
        self._pointed_out = True
        name = getattr(function, "__name__", "the step function")
        warnings.warn(
            f"{name}() ran the model in training mode and with gradients, but did not call "
            "model.backward(loss), so nothing is trained. Call it in the step function; for an evaluation "
            "call model.eval() before, or run the step under torch.no_grad().",
            stacklevel=stacklevel_of_user(),
        )


def _called(function: Callable[..., Any]) -> str:
    return f"{STEP} {getattr(function, '__qualname__', type(function).__qualname__)}"


def _ranks_of_a_step(current: Context) -> Sequence[int]:
    """The ranks that make a step together: all, but not in evaluations: replicas share no gradients."""
    return range(current.mesh.world_size) if torch.is_grad_enabled() else ranks_with_the_model()


def _hint_for_evaluations(current: Context) -> str:
    """The advice for a step that only some replicas make, and that may be no training."""
    if current.mesh.data == 1 or not torch.is_grad_enabled():
        return ""
    return "If it is an evaluation that only some replicas make, call it under torch.no_grad()."
