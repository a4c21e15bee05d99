"""`DistributedModel`, the model that the script sees."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.config.config import refuse_misplaced
from shardwright.errors import UsageError
from shardwright.run.context import Context, context, is_initialized
from shardwright.run.memory import keep_freed_memory
from shardwright.torch.batch.batch import Batch
from shardwright.torch.batch.step_output import BatchResult, StepEngine
from shardwright.torch.counting.compiled_modules import compile_as_wished, without_prefixes
from shardwright.torch.execution.pipeline_engine import PipelineEngine
from shardwright.torch.execution.single_engine import SingleEngine
from shardwright.torch.interception.backward_calls import refuse_no_tensor
from shardwright.torch.interception.glue import active_handler, plain_torch
from shardwright.torch.loss_scale import GradientScaling, LossScaler
from shardwright.torch.model.spread_module import ModelState, SpreadModule, accepted
from shardwright.torch.model.steps import CallOutside, Steps, refuse_call
from shardwright.torch.parameters.first_values import Initialise
from shardwright.torch.parameters.materialise import Materialiser
from shardwright.torch.parameters.parameter_kinds import (
    cast_inputs,
    cast_model,
    cast_outputs,
    first_kinds,
    low_precision,
    move_to,
)
from shardwright.torch.parameters.registration import WrappedOptimizer
from shardwright.torch.parameters.residency import Residency
from shardwright.torch.pytorch.modules import user_line
from shardwright.torch.replicas.replicas import Replicas
from shardwright.torch.step_end.step_end import StepEnd
from shardwright.torch.tracing.tracer import Tracer

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
        average_grads_across_microbatches: gradients are those of the whole batch, by what the loss is over
            its samples; else the sum over the microbatches, whatever it is.
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
        **others: Any,
    ):
        refuse_misplaced(
            "sw.DistributedModel",
            others,
            takes=(
                "initialize",
                "average_grads_across_microbatches",
                "overlapping_allreduce",
                "bucket_cap_mb",
            ),
        )
        current = context()
        if isinstance(module, DistributedModel):
            raise UsageError("this model is wrapped already. Call DistributedModel once.")
        module = accepted(module, current)
        compile_as_wished(module, current)
        bucket_bytes = int(bucket_cap_mb * 2**20)
        replicas = Replicas(current, module, bucket_bytes=bucket_bytes, overlap=overlapping_allreduce)
        super().__init__(module, replicas)
        self.first_buffers = first_kinds(module)
        self.average_grads_across_microbatches = average_grads_across_microbatches
        self._post_partition_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._materialiser = Materialiser(module, device=current.device, initialize=initialize)
        self._materialiser.check()
        self._state = ModelState(module, self.replicas, self._materialiser)
        self._has_told_no_sync = False
        self._when_settled: list[Callable[[], None]] = []
        # Before anything is measured: giving memory back and taking it again costs time.
        keeps_memory = current.device.type == "cpu"
        gives_back = keeps_memory and keep_freed_memory()
        self._low_precision = low_precision(current.config)
        if self._low_precision is not None:
            cast_model(module, self._low_precision)
        self.labels_of_batch = 0.0
        self.scaling: GradientScaling | None = None
        if current.config.fp16:
            self.scaling = GradientScaling(LossScaler(), self.local_parameters, current.device)
        for optimizer in current.optimizers:
            self._scale_as_wanted(optimizer)
        if not current.mesh.spreads_model:
            self._take_memory(current)
        self._engine: StepEngine = self._new_engine(current)
        self.step_end = StepEnd(current, self)
        self._call_outside = CallOutside(self.forward)
        self._steps = Steps(current, self, self._engine, self.step_end, gives_back=gives_back)
        current.model = self
        for optimizer in current.optimizers:
            optimizer.match_names()

    def _take_memory(self, current: Context) -> None:
        """Gives memory on the device of this rank to the whole model."""
        module = self.get_module()
        self._materialiser.agree_on_seed()
        shared = self.replicas.filled_when_shared(dict(module.named_parameters()))
        self._materialiser.everything(but=shared)
        move_to(module, current.device)

    def _new_engine(self, current: Context) -> "StepEngine":
        several = current.mesh.spreads_model
        if not several and not current.config.plan_one_stage:
            return SingleEngine(current, self)
        from shardwright.torch.measuring.planning import Planner

        planner = Planner(current, self.get_module(), self._materialiser)
        if not several:
            return SingleEngine(current, self, planner)
        return PipelineEngine(current, self, planner, self._materialiser)

    # ---- running ----

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module; outside of step functions, a spread model only without gradients."""
        if active_handler() is None and context().mesh.spreads_model:
            refuse_call(trains=torch.is_grad_enabled(), has_values=not self.waits_for_memory)
            if self.partitioned:
                return self._call_outside.run(self.run_step, args, kwargs)
            first = next(self.get_module().parameters(), None)
            device = context().device if first is None else first.device
            args, kwargs = self._call_outside.agreed(args, kwargs, device)
        if not isinstance(active_handler(), Tracer):  # an evaluation is traced with gradients, too
            self._steps.called_to_train |= torch.is_grad_enabled() and self.get_module().training
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
            self._steps.outside.watch(self.get_module(), tensors)

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

    def run_step(self, function: Callable[..., Any], batch: Batch) -> BatchResult:
        """Runs a step function on a batch; `sw.step` calls it."""
        return self._steps.run(function, batch)

    @property
    def loss_scale(self) -> float:
        """The factor on losses before the backward."""
        return 1.0 if self.scaling is None else self.scaling.scaler.scale

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

    def join(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        """Of `DistributedDataParallel`; refused here, with what to do instead."""
        raise UsageError(
            "model.join() is not there: a step is made by all ranks together. Give all ranks as many batches "
            "(sw.data_loader does), or end the loop on all of them after the batches of the shortest."
        )

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

    def described_state(self) -> dict[str, Any]:
        """The state with the parameters and buffers themselves; those of other ranks have no values."""
        return self._state.described(keep_vars=True)

    def some_of_state(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Of `state_dict` these tensors alone, which are gathered alone; collective over the replica."""
        return self._state.some(names)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads the whole model's state; each rank takes its share.

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
        """Has something called once this rank has only its own parameters: now, or in the first step."""
        if self.settled:
            call()
        else:
            self._when_settled.append(call)

    # ---- called by the engine and by optimizers ----

    @property
    def waits_to_settle(self) -> bool:
        """Whether a state, or a hook, waits for this rank to have its own parameters."""
        waiting = self._state.waits or self._post_partition_hooks or self._when_settled
        return not self.settled and bool(waiting)

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
        """Records the places of parameters, and tells optimizers and hooks.

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
            "needs all weights (generate, save_pretrained) finds only those of this rank there. On all "
            "ranks, `with torch.no_grad(), model.gathered(model):` around it gives them all, if a rank has "
            "the memory, and model.state_dict() has them in a copy."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a DistributedModel cannot be pickled or copied: it holds the weights of one rank, and "
            "connections to the others. Save model.state_dict(), called on all ranks, and load it with "
            "load_state_dict. For an average of the weights (EMA, SWA) take model.local_named_parameters() "
            "on each rank. A copy that is part of the training is made of the module before it is wrapped."
        )


def wrapped_model() -> DistributedModel | None:
    model = context().model if is_initialized() else None
    assert model is None or isinstance(model, DistributedModel)
    return model
