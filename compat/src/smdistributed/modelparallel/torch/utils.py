"""Small helpers under the names that scripts import."""

from typing import Any

from torch import Tensor

from smdistributed.modelparallel.torch.state_mod import current_run, state

__all__ = ["get_distribution_axis", "rmsg"]


def rmsg(message: Any) -> str:
    """A message with the ranks of whoever says it."""
    if not state.initialized:
        return str(message)
    run = current_run()
    places = ", ".join(f"{axes}_rank {run.mesh.group_rank(axes, run.rank)}" for axes in ("pp", "tp", "rdp"))
    return f"[rank {run.rank}, {places}] {message}"


def get_distribution_axis(tensor: Tensor) -> int | None:
    """The axis along which ranks share a parameter for tensor parallelism: None, as none is shared."""
    return None
