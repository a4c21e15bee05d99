"""Replicas with different numbers of batches: ``with model.join():``.

A replica that has no batch left goes on with its last one, weighted by zero, until the others are done, so
that their gradients can be summed. Then all take the model of one that was there to the end::

    replica 0   batch 1   batch 2   batch 3   batch 4 │ model of replica 0
    replica 1   batch 1   batch 2   (2 x 0)   (2 x 0) │ model of replica 0

As with PyTorch's DistributedDataParallel, gradients are divided by the number of all replicas, and the states
of optimizers are not exchanged.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import shardwright.torch as sw
from shardwright.errors import UsageError
from smdistributed.modelparallel.torch.state_mod import current_run


class Joining:
    """The inside of one ``with model.join():``.

    Attributes:
        weight: what losses are multiplied by now; None for nothing.
    """

    def __init__(self, model: sw.DistributedModel, *, throws: bool):
        run = current_run()
        if run.mesh.shard > 1 or run.config.shard_optimizer_state:
            raise UsageError(
                "model.join() lets replicas make different numbers of updates. Here they share parameters or "
                "the state of the optimizer, so that each update needs all of them. Give all replicas the "
                "same number of batches: shardwright.torch.distributed_sampler does."
            )
        model.step_end.numbers.compares_updates = False
        self._model = model
        self._throws = throws
        self._run_last: Callable[[], Any] | None = None
        self._last_active: list[int] = []
        self.weight: float | None = None

    def begin_step(self, repeat: Callable[[], Any]) -> None:
        """This replica has a batch; collective over the replicas."""
        if not torch.is_grad_enabled():
            raise UsageError(
                "an evaluation inside of model.join(): replicas with no batch left would not take part. "
                "Evaluate behind the with statement."
            )
        self._run_last = repeat
        self._announce(active=True)

    def end(self) -> None:
        """This replica has no batch left; returns when none has."""
        while self._announce(active=False):
            if self._run_last is None:
                raise UsageError(
                    "this replica has not made a single step inside of model.join(), so that it has nothing "
                    "to repeat while others train. Give each replica one batch at least."
                )
            self.weight = 0.0
            try:
                self._run_last()
            finally:
                self.weight = None
            for parameter in self._model.local_parameters():
                parameter.grad = None
        self._take_over()

    def _announce(self, *, active: bool) -> bool:
        """Tells the replicas, and finds out whether any has a batch."""
        run = current_run()
        assert run.groups.data is not None
        flags = torch.zeros(run.mesh.data, device=run.device)
        flags[run.data_rank] = float(active)
        dist.all_reduce(flags, group=run.groups.data)
        found = [replica for replica, flag in enumerate(flags.tolist()) if flag]
        if found:
            self._last_active = found
        if self._throws and 0 < len(found) < run.mesh.data:
            ended = sorted(set(range(run.mesh.data)) - set(found))
            raise UsageError(
                f"replica {', '.join(map(str, ended))} of {run.mesh.data} has no batch left, and others do: "
                "model.join(throw_on_early_termination=True) makes that an error everywhere."
            )
        return bool(found)

    @torch.no_grad()
    def _take_over(self) -> None:
        """Gives all replicas the model of one that was there to the end."""
        run = current_run()
        if not self._last_active:
            return
        source = run.mesh.group("dp", run.rank)[self._last_active[0]]
        buffers = (buffer for _, buffer in self._model.local_named_buffers())
        for tensor in (*self._model.local_parameters(), *buffers):
            if tensor.numel():
                dist.broadcast(tensor.detach(), source, group=run.groups.data)
