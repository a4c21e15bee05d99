"""Selects the parameters and buffers that replicas can send one another."""

import torch
import torch.distributed as dist
from torch import nn

from shardwright.errors import UsageError

__all__ = ["refuse_unsendable"]

_OF_GLOO = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex128,
        torch.complex64,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)


def refuse_unsendable(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Refuses a model with a type that the replicas' process group cannot send."""
    if group is None or dist.get_backend(group) != "gloo":
        return
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.dtype not in _OF_GLOO:
            raise UsageError(
                f"{name} is {tensor.dtype}, and the replicas send one another their parameters through gloo, "
                "which lacks this type. Leave out ddp_dist_backend and shared_memory, so that Shardwright's "
                "own collectives send it; or cast it."
            )
