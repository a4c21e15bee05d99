"""Training with one stage without ``smp.step``: the model is called, then ``model.backward(loss)``.

Replicas then average their gradients when a backward is over. What earlier ones left there is the same on all
of them already, so that the average leaves it alone.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.torch.source_line import user_line
from smdistributed.modelparallel.torch.state_mod import current_run

__all__ = ["backward_outside"]


def backward_outside(module: nn.Module, loss: Tensor, gradient: Tensor | None) -> None:
    """Runs autograd, and has replicas agree on gradients and buffers; collective over the replicas.

    Args:
        module: the user's module.
        loss: one number, or any tensor if `gradient` is given.
        gradient: gradient of what is trained with respect to `loss`.

    Raises:
        UsageError: the model is spread over stages, parameters are shared, or the loss is scaled.
    """
    run = current_run()
    for asked, why in (
        (run.mesh.pipeline > 1, "the stages of the model work together"),
        (run.mesh.shard > 1, "the ranks that share parameters work together"),
        (run.config.fp16, "the loss is scaled"),
    ):
        if asked:
            raise UsageError(
                f"{user_line()}: model.backward(loss) belongs inside a function decorated with @smp.step, "
                f"where {why}."
            )
    torch.autograd.backward(loss, gradient)
    if run.data_group is not None:
        _average(list(module.parameters()), run.data_group, num_replicas=run.mesh.data)
        first = run.mesh.group("dp", run.rank)[0]
        for buffer in module.buffers():
            if buffer.numel():
                dist.broadcast(buffer.detach(), first, group=run.data_group)


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
        dist.all_reduce(packed, group=group)
        packed.div_(num_replicas)
        parts = torch.split(packed, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view(gradient.shape))
