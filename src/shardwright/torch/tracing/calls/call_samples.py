"""Keeps one call of each cost class, to time it and to count its temporary memory."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.torch._private import num_hooks_registered
from shardwright.torch.counting.cost_counter import Watch, cost_class
from shardwright.torch.counting.hook_effects import HookEffects
from shardwright.torch.pytorch.tensors import autocast_state
from shardwright.torch.tracing.calls.traced_call import TracedCall
from shardwright.torch.tracing.calls.working_memory import WorkingMemory, working_memory
from shardwright.torch.tracing.trace_data import Sample
from shardwright.torch.tracing.traced_values import TracedValues

__all__ = ["CallSamples"]


class CallSamples:
    """The first call of each cost class.

    Args:
        values: of the trace.
        memory: cost class -> temporary memory, as far as it is known; what is counted is added. None: it is
            not counted.
        watch: is shown what calls make that run to be counted.
        hooks: knows which hooks of modules change something.

    Attributes:
        samples: cost class -> arguments of its first call.
        counts: a call runs to be counted, and not because the step function makes it.
        num_hooks: hooks that counting has registered, which are none of the step function's.
    """

    def __init__(
        self,
        values: TracedValues,
        memory: dict[str, WorkingMemory] | None,
        *,
        watch: Watch,
        hooks: HookEffects,
    ):
        self.samples: dict[str, Sample] = {}
        self.counts = False
        self.num_hooks = 0
        self._values = values
        self._watch = watch
        self._hooks = hooks
        self._memory = memory

    def cost_class(self, call: TracedCall, kind: str, kept: list[Any] | None = None) -> str:
        """The cost class of a call, whose arguments are kept if it is the first.

        Args:
            call: the call.
            kind: what is called.
            kept: leaves of the arguments, with copies of what the call may change; by default its fakes.
        """
        # What comes from the batch takes no memory when it is kept, unlike what another call made.
        from_batch = [at for at, item in enumerate(call.items) if self._is_somebody_elses(item)]
        # What is cast computes in another type than its arguments have.
        autocast = autocast_state()
        casts = [f"{device} {dtype}" for device, enabled, dtype in autocast if enabled]
        noted = " ".join(str(part) for part in (from_batch, casts) if part)
        if isinstance(call.func, nn.Module):
            self._hooks.note_call(call.func)
        key = cost_class(call.func, f"{kind} {noted}" if noted else kind, call.fakes)
        if key not in self.samples:
            arguments = call.fakes if kept is None else kept
            structure = call.structure.without_template()
            self.samples[key] = Sample(call.func, arguments, structure, autocast, self._hooks)
        return key

    def working_memory(self, key: str, call: TracedCall) -> WorkingMemory:
        """The temporary memory of a cost class; counted for the first of its calls."""
        # A gradient leads back through what ran before, where recomputation would call units once more.
        if self._memory is None or call.func is torch.autograd.grad:
            return WorkingMemory()
        if key not in self._memory:
            given: Sequence[bool] = [self._is_somebody_elses(item) for item in call.items]
            before = num_hooks_registered()
            self.counts = True
            try:
                with self._values.fake_mode:
                    self._memory[key] = working_memory(
                        call.func,
                        call.fakes,
                        call.structure,
                        given=given,
                        watch=self._watch,
                        hooks=self._hooks,
                    )
            finally:
                self.counts = False
            self.num_hooks += num_hooks_registered() - before
        return self._memory[key]

    def _is_somebody_elses(self, item: Any) -> bool:
        """Whether a leaf is a tensor that no node made: the batch's, or a parameter."""
        return isinstance(item, Tensor) and self._values.find(item) is None
