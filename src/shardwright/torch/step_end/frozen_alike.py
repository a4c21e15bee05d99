"""Refuses replicas that froze different parameters, and would sum gradients of different ones.

A rank packs the gradients of the parameters it trains. If each replica has frozen as many numbers, no message
shows the difference::

    rank 0   a frozen    gradients of b, c  ──┐
    rank 1   b frozen    gradients of a, c  ──┴──► b + a, c + c
"""

from collections.abc import Sequence

from torch import nn

from shardwright.comm.joining.process_group import tell_all
from shardwright.errors import UsageError
from shardwright.run.context import Context

__all__ = ["frozen_otherwise"]


def frozen_otherwise(
    context: Context, module: nn.Module, digests: Sequence[float], *, step: int
) -> UsageError | None:
    """Says which parameter only some replicas have trained; collective over all ranks where there is one."""
    if len(set(digests)) == 1:
        return None
    groups = context.mesh.groups("dp")
    if all(len({digests[rank] for rank in ranks}) == 1 for ranks in groups):
        return None
    trained = tell_all([name for name, parameter in module.named_parameters() if parameter.requires_grad])
    for first, *others in groups:
        for rank in others:
            for name in sorted({*trained[first]} ^ {*trained[rank]}):
                where, not_where = (first, rank) if name in trained[first] else (rank, first)
                return UsageError(
                    f"in step {step}, {name} is trained on rank {where} and frozen on rank {not_where}. They "
                    "are replicas of one model, and have added up gradients of different parameters. No rank "
                    "has made the update. Call requires_grad_() alike on all ranks."
                )
    return None
