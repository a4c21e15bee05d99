"""What a thread of this process is doing, by the functions that it is in."""

from types import FrameType

import torch.distributed as dist

__all__ = ["joint_call", "script_line"]

_OURS = ("torch.", "shardwright.", "smdistributed.", "contextlib", "threading")
# Functions that no rank leaves before all of the group have called them.
_JOINT = frozenset(
    "all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single barrier "
    "monitored_barrier reduce_scatter reduce_scatter_tensor".split()
)
_MODULE = "torch.distributed.distributed_c10d"


def script_line(frame: FrameType) -> str:
    """``file:line`` of the innermost function that is neither PyTorch's nor ours; empty where none is."""
    current: FrameType | None = frame
    while current is not None:
        module = current.f_globals.get("__name__", "")
        if not module.startswith(_OURS) and module != "torch":
            return f"{current.f_code.co_filename}:{current.f_lineno}"
        current = current.f_back
    return ""


def joint_call(frame: FrameType) -> tuple[str, tuple[int, ...]] | None:
    """The function of `torch.distributed` that a thread is in and that all ranks of a group must call.

    Args:
        frame: the innermost function of the thread.

    Returns:
        Its name, and the world ranks of the group; None where it is in none.
    """
    current: FrameType | None = frame
    found = None
    while current is not None:
        name = current.f_code.co_name
        if current.f_globals.get("__name__") == _MODULE and name in _JOINT:
            found = current  # the outermost one: all_gather_object calls all_gather
        current = current.f_back
    if found is None or not dist.is_initialized():
        return None
    group = found.f_locals.get("group")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        return None
    return found.f_code.co_name, tuple(dist.get_process_group_ranks(group))
