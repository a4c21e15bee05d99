"""The model as the script sees it."""

import logging
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from shardwright.comm.joining.process_group import groups_in_doubt
from shardwright.errors import PeerLostError, UsageError
from shardwright.torch.batch.batch import Batch
from shardwright.torch.batch.batch_result import BatchResult, Engine
from shardwright.torch.counting.compiled_modules import without_prefixes
from shardwright.torch.execution.pipeline_engine import PipelineEngine
from shardwright.torch.execution.single_engine import SingleEngine
from shardwright.torch.interception.backward_outside import BackwardWatch, refuse_backward_outside
from shardwright.torch.interception.glue import active_handler, plain_torch
from shardwright.torch.interception.loss_checks import refuse_no_tensor
from shardwright.torch.interception.own_errors import point_out_in_run
from shardwright.torch.loss_scale.grad_scaler import scaling_begins
from shardwright.torch.loss_scale.gradient_scaling import GradientScaling
from shardwright.torch.loss_scale.loss_scaler import LossScaler
from shardwright.torch.model.accepted_module import accepted
from shardwright.torch.model.model_state import ModelState
from shardwright.torch.model.spread_module import SpreadModule
from shardwright.torch.parameters.buffer_kind import first_kinds
from shardwright.torch.parameters.first_values import Initialise
from shardwright.torch.parameters.materialise import Materialiser
from shardwright.torch.parameters.precision import cast_inputs, cast_model, cast_outputs, low_precision
from shardwright.torch.parameters.residency import Residency
from shardwright.torch.pytorch.heap import give_back_freed_memory, keep_freed_memory
from shardwright.torch.pytorch.source_line import stacklevel_of_user, user_line
from shardwright.torch.replicas.replicas import Replicas
from shardwright.torch.run.context import Context, context, is_initialized
from shardwright.torch.run.cores import OwnCores
from shardwright.torch.run.failure import first_cause_named
from shardwright.torch.run.joint_calls import call_together, ranks_with_the_model
from shardwright.torch.run.roles import WrappedOptimizer
from shardwright.torch.run.uneven_data import STEP, TogetherUntil, out_of_data
from shardwright.torch.step_end.step_end import StepEnd
from shardwright.torch.tracing.tracer import Tracer

__all__ = ["DistributedModel", "wrapped_model"]

log = logging.getLogger(__name__)


class DistributedModel(SpreadModule):
    """Wraps any `nn.Module`; inside a step function it is called as the module itself.

    With one stage it runs the module as it is. With more, each rank keeps the units of its own stages once
    the first step has shown what the model does.

    A model that was built under ``torch.device("meta")`` has no memory. Each rank takes it for its own units
    alone, in the first step, and has modules fill it: by their ``reset_parameters()`` and by the
    ``_init_weights(module)`` of the model around them (as Hugging Face transformers have it).

    Args:
        module: the model, the same on every rank. One per script.
        initialize: for a model on the meta device: called with each module whose parameters or buffers get
            memory, after its own methods; fills those in place that nothing else fills.
        average_grads_across_microbatches: gradients are the mean over the microbatches of a batch; else
            their sum.
        overlapping_allreduce: reduce gradients over replicas during the last backward; else after it.
        bucket_cap_mb: most megabytes (2**20 bytes) reduced in one message.

    Example:
        >>> import torch, shardwright.torch as sw
        >>> sw.init()
        >>> model = sw.DistributedModel(torch.nn.Linear(2, 1))
        >>> @sw.step
        ... def train_step(model, x):
        ...     loss = model(x).mean()
        ...     model.backward(loss)
        ...     return loss
        >>> train_step(model, torch.ones(4, 2)).reduce_mean().shape
        torch.Size([])
        >>> sw.shutdown()
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        initialize: Initialise | None = None,
        average_grads_across_microbatches: bool = True,
        overlapping_allreduce: bool = True,
        bucket_cap_mb: float = 25,
    ):
        current = context()
        if isinstance(module, DistributedModel):
            raise UsageError("this model is wrapped already. Call DistributedModel once.")
        module = accepted(module, current)
        bucket_bytes = int(bucket_cap_mb * 2**20)
        replicas = Replicas(current, module, bucket_bytes=bucket_bytes, overlap=overlapping_allreduce)
        super().__init__(module, replicas)
        self.first_buffers = first_kinds(module)
        self.average_grads_across_microbatches = average_grads_across_microbatches
        self._post_partition_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._materialiser = Materialiser(module, device=current.device, initialize=initialize)
        self._materialiser.check()
        self._state = ModelState(module, self.replicas, self._materialiser)
        self._called_to_train = self._pointed_out = self._has_told_no_sync = False
        self._trained_by: WeakSet[Callable[..., Any]] = WeakSet()  # step functions that have called backward
        self._when_settled: list[Callable[[], None]] = []
        self._outside = BackwardWatch(refuse_backward_outside)
        self._cores = OwnCores(current)
        # Before anything is measured: giving memory back and taking it again costs time.
        keeps_memory = current.device.type == "cpu" and current.config.keep_freed_memory
        self._gives_back = keeps_memory and keep_freed_memory()
        self._low_precision = low_precision(current.config)
        if self._low_precision is not None:
            cast_model(module, self._low_precision)
        self.scaling: GradientScaling | None = None
        if current.config.fp16:
            self.scaling = GradientScaling(LossScaler(), self.local_parameters, current.device)
        for optimizer in current.optimizers:
            self._scale_as_wanted(optimizer)
        if current.mesh.pipeline == 1:
            self._take_memory(current)
        self._engine: Engine = self._new_engine(current)
        self.step_end = StepEnd(current, self)
        self._together = TogetherUntil(current)
        current.model = self
        for optimizer in current.optimizers:
            optimizer.match_names()

    def _take_memory(self, current: Context) -> None:
        """Gives memory on the device of this rank to the whole model."""
        module = self.get_module()
        self._materialiser.agree_on_seed()
        shared = self.replicas.filled_when_shared(dict(module.named_parameters()))
        self._materialiser.everything(but=shared)
        if current.device.type != "cpu":
            move: Any = module._apply
            move(lambda tensor: tensor if tensor.is_meta else tensor.to(current.device))

    def _new_engine(self, current: Context) -> "Engine":
        several = current.mesh.pipeline > 1
        if not several and not current.config.plan_one_stage:
            return SingleEngine(current, self)
        from shardwright.torch.measuring.planning import Planner

        planner = Planner(current, self.get_module(), self._materialiser)
        if not several:
            return SingleEngine(current, self, planner)
        return PipelineEngine(current, self, planner, self._materialiser)

    # ---- running ----

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module; with more than one stage, only inside a step function."""
        if active_handler() is None and context().mesh.pipeline > 1:
            raise UsageError(
                f"{user_line()}: the model is spread over stages, so it can be called only inside a function "
                "decorated with @sw.step. Decorate the function that calls it, for an evaluation too."
            )
        if not isinstance(active_handler(), Tracer):  # an evaluation is traced with gradients, too
            self._called_to_train |= torch.is_grad_enabled() and self.get_module().training
        if self._low_precision is not None:
            args, kwargs = cast_inputs((args, kwargs), self._low_precision)
        if active_handler() is None and self.replicas.sharding is not None:
            result = self._whole_for_a_call(*args, **kwargs)
        else:
            result = self.get_module()(*args, **kwargs)
        if active_handler() is None and torch.is_grad_enabled():
            self.called_outside((args, kwargs, result))
        return result if self._low_precision is None else cast_outputs(result)

    def called_outside(self, tensors: Any) -> None:
        """Takes care of a call outside of steps, with gradients.

        Args:
            tensors: what it was given and has returned.
        """
        if context().mesh.data > 1:
            self._outside.watch(self.get_module(), tensors)

    def _whole_for_a_call(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module outside of a step: all ranks that share its parameters do."""
        if torch.is_grad_enabled():
            raise UsageError(
                f"{user_line()}: the ranks share the parameters of the model, so that what is computed with "
                "gradients belongs inside a function decorated with @sw.step. For an evaluation outside, "
                "call the model under torch.no_grad(), on all ranks."
            )
        with self.replicas.rows_as_used():
            return self.get_module()(*args, **kwargs)

    def backward(self, loss: Tensor, gradient: Tensor | None = None) -> None:
        """Runs the backward of a microbatch.

        Call it once, inside the step function, in place of ``loss.backward()``.

        Args:
            loss: one number, or any tensor if `gradient` is given.
            gradient: gradient of what is trained with respect to `loss`, of the same shape.
        """
        handler = active_handler()
        if handler is None:
            raise UsageError(
                f"{user_line()}: model.backward(loss) belongs inside a function decorated with @sw.step."
            )
        refuse_no_tensor(loss)
        with plain_torch():
            handler.backward(loss, gradient)

    def run_step(self, function: Callable[..., Any], batch: Batch) -> list[Any]:
        """Runs a step function on a batch; `sw.step` calls it."""
        self._together.begin_step()
        try:
            return self._run_step(function, batch)
        except PeerLostError as error:
            told = out_of_data(context(), error) if torch.is_grad_enabled() else error
            if told is error:
                raise
            raise told from error

    def _run_step(self, function: Callable[..., Any], batch: Batch) -> list[Any]:
        current = context()
        start = time.perf_counter()
        self._called_to_train = False
        scaling_begins()
        self._outside.step_begins()
        # The first step measures and plans, with all cores; it frees what other ranks keep.
        plans = not self.partitioned or (current.config.plan_one_stage and current.plan is None)
        own_cores = nullcontext() if plans else self._cores.in_force()
        hint = "" if function in self._trained_by else _hint_for_evaluations(current)
        together = call_together(_called(function), _ranks_of_a_step(current), hint=hint)
        if self.partitioned and self._gives_back:
            self._gives_back = False
            give_back_freed_memory()
        with first_cause_named(current), own_cores, together:
            try:
                run = self._run(function, batch)
            except BaseException as error:
                groups_in_doubt()
                if isinstance(error, Exception):
                    point_out_in_run(error, self.get_module())
                raise
            if run.losses is not None:
                self._trained_by.add(function)
                self.step_end.come(run, begun_s=start)
            elif self._called_to_train and current.rank == 0:
                self._point_out_missing_backward(function)
        return run.results

    def _run(self, function: Callable[..., Any], batch: Batch) -> BatchResult:
        """Runs a batch, with all rows of shared parameters and without the gradients of earlier batches."""
        replicas, scaling = self.replicas, self.scaling
        try:
            if replicas.sharding is not None:
                replicas.sharding.to_whole()
            if scaling is not None:
                scaling.begin(self._engine.reduced)
            run = self._engine.run(function, batch)
            if scaling is not None:
                scaling.finish(self._engine.reduced, replicas.sums_of_rows, trained=run.losses is not None)
        except BaseException:
            if scaling is not None:
                scaling.leave()
            if replicas.sharding is not None:
                replicas.sharding.leave()
            raise
        if replicas.sharding is not None:
            replicas.sharding.to_sharded()
        return run

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by before the backward."""
        return 1.0 if self.scaling is None else self.scaling.scaler.scale

    def _point_out_missing_backward(self, function: Callable[..., Any]) -> None:
        """Warns once of a step that looks like training and trains nothing."""
        if self._pointed_out or function in self._trained_by:
            return
        if not any(p.requires_grad for p in self.get_module().parameters()):
            return
        self._pointed_out = True
        name = getattr(function, "__name__", "the step function")
        warnings.warn(
            f"{name}() ran the model in training mode and with gradients, but did not call "
            "model.backward(loss), so nothing is trained. Call it in the step function; for an evaluation "
            "call model.eval() before, or run the step under torch.no_grad().",
            stacklevel=stacklevel_of_user(),
        )

    # ---- what scripts for DistributedDataParallel call ----

    def no_sync(self) -> AbstractContextManager[None]:
        """Changes nothing: gradients of several steps add up, each as the mean over the replicas.

        That is what `no_sync` and a last step outside of it give with `DistributedDataParallel`. What
        it saves there, messages, more microbatches in one step save here.
        """
        if not self._has_told_no_sync and context().rank == 0:
            self._has_told_no_sync = True
            log.warning(
                "model.no_sync() changes nothing: gradients of several steps add up as they should. One step "
                "with more microbatches sends fewer messages."
            )
        return nullcontext()

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """Around a training loop: where the data of one rank ends, the loop ends on all ranks.

        So all make as many steps, and batches that other ranks have left are not used. (With
        `DistributedDataParallel` those go on alone.) Each step asks the others first, which takes a small
        message.

        Args:
            divide_by_initial_world_size: no difference here, where no rank goes on alone.
            enable: false: change nothing.
            throw_on_early_termination: end with an error instead, on all ranks.
        """
        return self._together.joined(throws=throw_on_early_termination) if enable else nullcontext()

    # ---- its state ----

    @property
    def partitioned(self) -> bool:
        """Whether every rank has been given its part: after the first step, or at once with one stage."""
        return self._residency is not None or isinstance(self._engine, SingleEngine)

    def state_dict(  # type: ignore[override]
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """The whole model's state under the names of the user's module; collective over the replica.

        Once the model is spread over stages it is a copy, which further training does not change.
        """
        return self._state.whole(destination, prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads the whole model's state; each rank takes what it holds.

        Before the first step of a model on the meta device, it is kept until then.
        """
        return self._state.load(without_prefixes(state_dict), strict=strict, assign=assign)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Has the units of each rank compiled, to be called before the first step.

        Args:
            *args: as for `torch.compile`.
            **kwargs: as for `torch.compile`.
        """
        if self.partitioned and not isinstance(self._engine, SingleEngine):
            raise UsageError("the units run already. Call model.compile() before the first step.")
        self.get_module().compile(*args, **kwargs)

    def register_post_partition_hook(self, hook: Callable[..., Any]) -> torch.utils.hooks.RemovableHandle:
        """Has ``hook(model, optimizer)`` called once every rank has its part."""
        handle = torch.utils.hooks.RemovableHandle(self._post_partition_hooks)
        self._post_partition_hooks[handle.id] = hook
        if self.partitioned:
            self._call_hook(hook)
        return handle

    @property
    def settled(self) -> bool:
        """Whether this rank has what it trains, and nothing else: after the first step, or earlier."""
        return self._residency is not None or (
            isinstance(self._engine, SingleEngine) and self._engine.has_shared
        )

    @property
    def waits_for_memory(self) -> bool:
        """Whether some parameter gets its memory in the first step."""
        return not self.settled and self._materialiser.waits

    def when_settled(self, call: Callable[[], None]) -> None:
        """Has something called once this rank has what it trains: now, or in the first step."""
        if self.settled:
            call()
        else:
            self._when_settled.append(call)

    # ---- called by the engine and by optimizers ----

    def settle(self) -> None:
        """Calls what has waited for this rank to have what it trains; loads a state that has."""
        if self._state.load_waiting() and self.replicas.sharding is not None:
            self.replicas.sharding.to_whole()  # the first step goes on with all rows
        while self._when_settled:
            self._when_settled.pop(0)()

    def takes(self, optimizer: WrappedOptimizer) -> None:
        """Checks an optimizer, and leaves it the parameters of this rank once they are known."""
        self._scale_as_wanted(optimizer)
        if self._residency is None:
            optimizer.check(self.get_module().parameters())
        else:
            optimizer.keep(self.local_parameter_ids())

    def _scale_as_wanted(self, optimizer: WrappedOptimizer) -> None:
        """Scales losses as an optimizer asks for; the last one that does, decides."""
        if self.scaling is not None and optimizer.scaler_wanted is not None:
            self.scaling.scaler = optimizer.scaler_wanted

    def placed(self, residency: Residency) -> bool:
        """Takes note of where parameters live, and tells optimizers and hooks.

        Returns:
            Whether the model is as it was: no state was waiting for this, and no hook.
        """
        self._residency = residency
        self._state.placed(residency)
        unchanged = not (self._state.load_waiting() or self._post_partition_hooks or self._when_settled)
        local = self.local_parameter_ids()
        for optimizer in context().optimizers:
            optimizer.keep(local)
        self.settle()
        for hook in list(self._post_partition_hooks.values()):
            self._call_hook(hook)
        return unchanged

    def _call_hook(self, hook: Callable[..., Any]) -> None:
        optimizers = context().optimizers
        hook(self, optimizers[0] if optimizers else None)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if name.startswith("__") or not hasattr(module, name):
                raise
        raise AttributeError(
            f"DistributedModel has no attribute {name}, but the module inside has: model.module.{name}. What "
            "needs all weights (generate, save_pretrained) finds only those of this rank there: "
            "model.state_dict(), called on all ranks, gives them all."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a DistributedModel cannot be pickled or copied: it holds the weights of one rank, and "
            "connections to the others. Save model.state_dict(), called on all ranks, and load it with "
            "load_state_dict. For an average of the weights (EMA, SWA) take model.local_named_parameters() "
            "on each rank. A copy that is part of the training is made of the module before it is wrapped."
        )


def _called(function: Callable[..., Any]) -> str:
    return f"{STEP} {getattr(function, '__qualname__', type(function).__qualname__)}"


def _ranks_of_a_step(current: Context) -> Sequence[int]:
    """Who makes a step together: all, but for evaluations, in which replicas share no gradients."""
    return range(current.mesh.world_size) if torch.is_grad_enabled() else ranks_with_the_model()


def _hint_for_evaluations(current: Context) -> str:
    """What to try where only some replicas make a step that may be no training."""
    if current.mesh.data == 1 or not torch.is_grad_enabled():
        return ""
    return "If it is an evaluation that only some replicas make, call it under torch.no_grad()."


def wrapped_model() -> DistributedModel | None:
    """The model of the present run; None before one is wrapped."""
    model = context().model if is_initialized() else None
    assert model is None or isinstance(model, DistributedModel)
    return model
