"""The wrapped model: ``smp.DistributedModel``."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

import shardwright.torch as sw
from smdistributed.modelparallel.torch.state_mod import current_run, state

__all__ = ["DistributedModel"]


class DistributedModel(sw.DistributedModel):
    """Wraps the one model of a script.

    Args:
        module: the model, the same on every rank.
        trace_device: ``"gpu"`` or ``"cpu"``; nothing here depends on it.
        trace_execution_times: units are measured anyway.
        overlapping_allreduce: False: gradients are reduced over replicas at the end of a step.
        backward_passes_per_step: gradients add up until ``zero_grad``, whatever it is.
        average_grads_across_microbatches: gradients are the mean over microbatches; else their sum.
        bucket_cap_mb: most megabytes reduced in one message.
        trace_memory_usage: memory is worked out anyway.
        broadcast_buffers: buffers are those of the first replica.
        gradient_as_bucket_view: changes nothing.
        find_unused_parameters: they are found anyway.
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
        super().__init__(
            module,
            average_grads_across_microbatches=average_grads_across_microbatches,
            overlapping_allreduce=overlapping_allreduce,
            bucket_cap_mb=bucket_cap_mb,
        )
        self._post_step_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()

    def register_post_step_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Has ``hook(model, optimizer)`` called once, after the next step."""
        handle = RemovableHandle(self._post_step_hooks)
        self._post_step_hooks[handle.id] = hook
        return handle

    def step_done(self) -> None:
        """Runs the hooks that waited for a step; ``smp.step`` calls it."""
        hooks = list(self._post_step_hooks.values())
        self._post_step_hooks.clear()
        for hook in hooks:
            hook(self, state.optimizer)
