"""Training with one stage without ``smp.step``: the model is called, then comes the backward.

Replicas average their gradients when a backward is over, whether the script calls ``model.backward(loss)`` or
``loss.backward()``. What earlier ones left there is the same on all of them already, so that the average
leaves it alone.

Where layers recompute themselves by a backward of their own (reentrant checkpointing), replicas agree behind
the outermost one. Each tells of itself, and those inside are over before it is::

    loss.backward()   ──► head ──► layer 1 ──────────────► layer 0 ──────────────► embedding ──► agree
                                     └► recompute, backward  └► recompute, backward
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.torch._private.modules import (
    backward_in_progress,
    behind_inner_backward,
    call_after_backward,
)
from shardwright.torch.pytorch.modules import user_line
from smdistributed.modelparallel.torch.state_mod import current_run


class BackwardWithoutStep:
    """The backward of a model that is called outside of steps; collective over the replicas."""

    def __init__(self, module: nn.Module):
        self._module = module
        self._is_ours = False
        self._told: set[int] = set()  # the backwards in progress that are known

    def run(self, loss: Tensor, gradient: Tensor | None) -> None:
        """Runs autograd, and has replicas agree on gradients and buffers."""
        _refuse("model.backward(loss)")
        self._is_ours = True
        try:
            torch.autograd.backward(loss, gradient)
        finally:
            self._is_ours = False
        self._agree()

    def reached(self) -> None:
        """Has replicas agree behind a backward that has come to a parameter; others of it will tell, too."""
        number = backward_in_progress()
        if self._is_ours or number in self._told:
            return
        _refuse("loss.backward()")
        self._told.add(number)
        if behind := behind_inner_backward():
            for node in behind:
                node.register_prehook(lambda gradients: self.reached())
        else:
            call_after_backward(self._agree)

    def _agree(self) -> None:
        self._told.clear()
        run = current_run()
        if run.groups.data is None:
            return
        _average(list(self._module.parameters()), run.groups.data, num_replicas=run.mesh.data)
        first = run.mesh.group("dp", run.rank)[0]
        for buffer in self._module.buffers():
            if buffer.numel():
                dist.broadcast(buffer.detach(), first, group=run.groups.data)


def _refuse(call: str) -> None:
    run = current_run()
    for asked, why in (
        (run.mesh.spreads_model, "the ranks that share the model work together"),
        (run.mesh.shard > 1, "the ranks that share parameters work together"),
        (run.config.fp16, "the loss is scaled"),
    ):
        if asked:
            raise UsageError(
                f"{user_line()}: {call} belongs inside a function decorated with @smp.step, where {why}."
            )


@torch.no_grad()
def _average(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, *, num_replicas: int) -> None:
    """Averages gradients; what no replica used keeps none."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    flags = torch.tensor([float(p.grad is not None) for p in trained], device=trained[0].device)
    dist.all_reduce(flags, group=group)
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for parameter, flag in zip(trained, flags.tolist(), strict=True):
        if flag:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            by_type.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for gradients in by_type.values():
        packed = torch.cat([gradient.reshape(-1) for gradient in gradients])
        packed.div_(num_replicas)  # before: large numbers have a mean in float16, and no sum
        dist.all_reduce(packed, group=group)
        parts = torch.split(packed, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view(gradient.shape))
