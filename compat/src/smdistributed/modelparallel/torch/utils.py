"""Small helpers under the names that scripts import."""

from typing import Any

from torch import Tensor

from shardwright.placement import Cut
from shardwright.torch.tensor_parallel.divided_tensor import placement_of
from smdistributed.modelparallel.torch.state_mod import current_run, state


def rmsg(message: Any) -> str:
    """A message with the ranks of whoever says it."""
    if not state.initialized:
        return str(message)
    run = current_run()
    places = ", ".join(f"{axes}_rank {run.mesh.group_rank(axes, run.rank)}" for axes in ("pp", "tp", "rdp"))
    return f"[rank {run.rank}, {places}] {message}"


def get_distribution_axis(tensor: Tensor) -> int | None:
    """The dimension along which ranks of a tensor-parallel group share a tensor; None for a whole one."""
    placement = placement_of(tensor)
    return placement.dim if isinstance(placement, Cut) else None
