"""The wrapped model: ``smp.DistributedModel``."""

import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardwright import cpu_mode
from shardwright.errors import UsageError
from shardwright.torch.batch.step_output import BatchResult
from shardwright.torch.interception.backward_calls import BackwardWatch, refuse_no_tensor
from shardwright.torch.interception.glue import active_handler
from smdistributed.modelparallel.comm import allgather
from smdistributed.modelparallel.groups import CommGroup
from smdistributed.modelparallel.torch.backward_without_step import BackwardWithoutStep
from smdistributed.modelparallel.torch.communication_hook import reduce_by_hook
from smdistributed.modelparallel.torch.ds_parameters import describe_parts
from smdistributed.modelparallel.torch.joining import Joining
from smdistributed.modelparallel.torch.local_modules import local_named_modules
from smdistributed.modelparallel.torch.loss_of_several import as_one
from smdistributed.modelparallel.torch.module_proxy import ModuleProxy, unproxied
from smdistributed.modelparallel.torch.nn.huggingface.layers import name_layers
from smdistributed.modelparallel.torch.nn.huggingface.translators_of_models import translators_of
from smdistributed.modelparallel.torch.original_forward import keep_original_forwards
from smdistributed.modelparallel.torch.stale_partition import naming_the_file
from smdistributed.modelparallel.torch.state_dicts.model import ModelStates
from smdistributed.modelparallel.torch.state_mod import current_run, state
from smdistributed.modelparallel.torch.tensor_parallelism.distributing import distribute
from smdistributed.modelparallel.torch.utils import get_distribution_axis
from smdistributed.modelparallel.torch.whole_model import gather_on_host, transient_buffers


class DistributedModel(ModelStates):
    """Wraps the one model of a script.

    Args:
        trace_device: ``"gpu"`` or ``"cpu"``; the model is traced without memory, whatever it is.
        overlapping_allreduce: reduce gradients during the last backward; else at the end of the step.
        backward_passes_per_step: steps between two updates. Gradients add up until ``zero_grad`` anyway.
        average_grads_across_microbatches: gradients are the mean over microbatches; else their sum.
        broadcast_buffers: buffers are those of the first replica, also where it is False.
        gradient_as_bucket_view: changes nothing.

    Attributes:
        is_in_step: a step is running, or is being traced.
    """

    def __init__(
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool = False,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: float = 25,
        trace_memory_usage: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
    ):
        current_run()
        _check_options(trace_device, backward_passes_per_step, broadcast_buffers=broadcast_buffers)
        module = unproxied(module)
        if isinstance(module, nn.Module):
            keep_original_forwards(module)
            module = distribute(module, dtype=torch.float16 if state.cfg.fp16_params else None)
            state.module_manager.translate_functions = list(translators_of(module))
            if state.wants_distributed_modules:
                name_layers(module)
        self._is_whole = self.is_in_step = False
        self._joining: Joining | None = None
        self._without_step = BackwardWithoutStep(module)
        super().__init__(
            module,
            average_grads_across_microbatches=average_grads_across_microbatches,
            overlapping_allreduce=overlapping_allreduce,
            bucket_cap_mb=bucket_cap_mb,
        )
        self._outside = BackwardWatch(self._without_step.reached)
        self._post_step_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._hooks_before_optimizer: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        if current_run().mesh.shard > 1:
            describe_parts(self)

    # ---- the user's module ----

    @property
    def module(self) -> Any:
        """The user's module, whose own ``module`` is that module itself."""
        return ModuleProxy(self.get_module())

    @module.setter
    def module(self, value: nn.Module) -> None:
        # `nn.Module` registers it without coming here; what comes here is no module.
        raise UsageError(f"model.module is an nn.Module, and cannot be a {type(value).__name__}.")

    def get_module(self) -> nn.Module:
        """The user's module."""
        module = self._modules["module"]
        assert module is not None
        return module

    # ---- running ----

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module; with more than one stage, only inside of ``smp.step``."""
        return self.get_module()(*args, **kwargs) if self._is_whole else super().forward(*args, **kwargs)

    def called_outside(self, tensors: Any) -> None:
        """Has replicas agree after the backward of a call outside of steps."""
        self._outside.watch(self.get_module(), tensors)

    def backward(
        self,
        tensors: Tensor | Sequence[Tensor],
        grad_tensors: Tensor | Sequence[Tensor | None] | None = None,
    ) -> None:
        """Runs the backward of a microbatch, in the place of ``torch.autograd.backward``.

        Args:
            grad_tensors: gradients of what is trained with respect to them; None for one that is a number.
        """
        if isinstance(tensors, Sequence):
            tensors, grad_tensors = as_one(tensors, grad_tensors), None
        elif isinstance(grad_tensors, Sequence):
            (grad_tensors,) = grad_tensors
        refuse_no_tensor(tensors)
        if self._joining is not None and self._joining.weight is not None:
            tensors = tensors * self._joining.weight
        if active_handler() is not None:
            super().backward(tensors, grad_tensors)
        else:
            self._without_step.run(tensors, grad_tensors)

    def run_step(self, *args: Any) -> BatchResult:
        """Runs a step function on a batch; ``smp.step`` calls it."""
        if self._is_whole:
            raise UsageError(
                "model.cpu() has gathered the model on every rank, so that it is spread over them no longer, "
                "and cannot be trained. Call it when training is over."
            )
        self.call_waiting_hooks()
        if self._joining is not None and self._joining.weight is None:
            # Another function is another trace: in this one losses are weighted.
            self._joining.begin_step(functools.partial(self.run_step, _Again(args[0]), *args[1:]))
        self.is_in_step = True
        try:
            with naming_the_file():
                return super().run_step(*args)
        finally:
            self.is_in_step = False

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Lets replicas train on different numbers of batches inside.

        Args:
            divide_by_initial_world_size: gradients are divided by the number of all replicas, also of those
                without a batch. False is not supported.
            enable: False does nothing.
            throw_on_early_termination: all replicas fail when the first has no batch left.
        """
        if not divide_by_initial_world_size:
            raise UsageError(
                "divide_by_initial_world_size=False is not supported: gradients are divided by the number of "
                "all replicas. Leave it out."
            )
        if not enable or current_run().mesh.data == 1:
            yield
            return
        if self._joining is not None:
            raise UsageError("model.join() is called inside of another one. Call it once around the loop.")
        self._joining = Joining(self, throws=throw_on_early_termination)
        try:
            yield
            self._joining.end()
        finally:
            self._joining = None

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Has a function reduce gradients over replicas; before the first step.

        Args:
            hook: ``hook(state, bucket)`` gives a future of what all replicas are to have, as hooks of
                `torch.nn.parallel.DistributedDataParallel` do. PyTorch's own reduce over the replicas where
                `state` is None.

        Raises:
            UsageError: `state` is a group that has ranks of other stages, too.
        """
        reduce_by_hook(self.replicas, state, hook)

    def register_post_partition_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Has ``hook(model, optimizer)`` called once every rank has its part.

        With one stage that is so at once; then a hook waits for the optimizer, or for the first step.
        """
        if not self.partitioned or state.optimizer is not None:
            return super().register_post_partition_hook(hook)
        handle = RemovableHandle(self._hooks_before_optimizer)
        self._hooks_before_optimizer[handle.id] = hook
        return handle

    def call_waiting_hooks(self) -> None:
        """Runs the hooks that waited for an optimizer; that calls it, and so does the first step."""
        while self._hooks_before_optimizer:
            _, hook = self._hooks_before_optimizer.popitem(last=False)
            super().register_post_partition_hook(hook)

    def after_step(self) -> None:
        """Runs the hooks that waited for a step; ``smp.step`` calls it."""
        hooks = list(self._post_step_hooks.values())
        self._post_step_hooks.clear()
        for hook in hooks:
            hook(self, state.optimizer)

    def register_post_step_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Has ``hook(model, optimizer)`` called once, after the next step."""
        handle = RemovableHandle(self._post_step_hooks)
        self._post_step_hooks[handle.id] = hook
        return handle

    # ---- devices ----

    def to(self, *args: Any, **kwargs: Any) -> "DistributedModel":
        """Casts as `nn.Module.to` does. Where the model is, the library decides: a device changes nothing."""
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and self.partitioned and not _computes_on(device):
            raise UsageError(
                f"the model is on {current_run().device.type}, where this rank computes, and cannot be moved "
                f"to {device}. To have all of it on the host of every rank, call model.cpu() on all ranks."
            )
        if dtype is not None or memory_format is not None:
            nn.Module.to(self, dtype=dtype, non_blocking=non_blocking, memory_format=memory_format)  # type: ignore[call-overload]
        return self

    def cuda(self, device: Any = None) -> "DistributedModel":
        """Changes nothing: the library decides where the model is."""
        return self.to(torch.device("cuda") if device is None else device)

    def cpu(self) -> "DistributedModel":
        """Has the whole model on the host of every rank; collective over all ranks.

        It can be called, and is not trained further.
        """
        if not self.partitioned:
            return super().cpu()
        whole = dict(self.state_dict())
        for others in allgather(transient_buffers(self.get_module()), CommGroup.MP_GROUP):
            whole.update(others)
        gather_on_host(self.get_module(), whole)
        self._is_whole = True
        return self

    # ---- what lives here ----

    # Scripts for SageMaker know the names of a wrapper: "module.layers.0".
    named_modules = nn.Module.named_modules
    get_submodule = nn.Module.get_submodule

    def local_buffers(self) -> Iterator[Tensor]:
        """Buffers that this rank holds."""
        return (buffer for _, buffer in self.local_named_buffers())

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules that belong to this rank, by their names; each belongs to one rank of the replica."""
        return local_named_modules(self.get_module(), current_run(), partitioned=self.partitioned)

    def local_modules(self) -> Iterator[nn.Module]:
        """Modules that belong to this rank."""
        return (module for _, module in self.local_named_modules())

    def virtual_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank as its optimizer sees them, by their names."""
        return self.local_named_parameters()

    # ---- tensor parallelism ----

    def distributed_modules(self) -> Iterator[nn.Module]:
        """Modules of which ranks of a tensor-parallel group have parts: parameters of their own are cut."""
        for module in self.get_module().modules():
            if any(self.is_distributed_parameter(p) for p in module._parameters.values() if p is not None):
                yield module

    def is_distributed_parameter(self, parameter: Tensor) -> bool:
        """Whether ranks of a tensor-parallel group have parts of a parameter."""
        return get_distribution_axis(parameter) is not None

    def is_distributed_buffer(self, buffer: Tensor) -> bool:
        """Whether they have parts of a buffer."""
        return get_distribution_axis(buffer) is not None

    # They see the batches of a whole tensor-parallel group.
    is_scaled_batch_parameter = is_distributed_parameter
    is_scaled_batch_buffer = is_distributed_buffer

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank that each rank of its tensor-parallel group has whole."""
        return (each for each in self.local_named_parameters() if not self.is_distributed_parameter(each[1]))

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank of which it has a part."""
        return (each for each in self.local_named_parameters() if self.is_distributed_parameter(each[1]))

    def __getattr__(self, name: str) -> Any:
        if name == "module":  # asked for before it is there
            raise AttributeError(name)
        return super().__getattr__(name)


def _computes_on(device: torch.device) -> bool:
    """Whether this rank computes on such a device; the CPU stands for CUDA in CPU mode."""
    own = current_run().device.type
    return device.type == own or (device.type == "cuda" and own == "cpu" and cpu_mode.is_enabled())


class _Again:
    """A step function under another identity."""

    def __init__(self, function: Callable[..., Any]):
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _check_options(trace_device: str, backward_passes_per_step: int, *, broadcast_buffers: bool) -> None:
    if trace_device not in ("gpu", "cpu"):
        raise UsageError(f'trace_device is {trace_device!r}, but it is "gpu" or "cpu".')
    passes = backward_passes_per_step
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise UsageError(f"backward_passes_per_step is {passes!r}, but it is a number of steps, at least 1.")
    if not broadcast_buffers and current_run().mesh.data > 1:
        warnings.warn(
            "broadcast_buffers=False changes nothing here: after each step the buffers of all replicas are "
            "those of the first.",
            stacklevel=3,
        )
