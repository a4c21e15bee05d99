"""Describes what a thread of this process is doing, by the functions on its stack."""

from dataclasses import dataclass
from types import FrameType

import torch.distributed as dist

from shardwright.comm._private import counts_messages, group_named, number_of_collectives

__all__ = ["JointCall", "collectives_made", "joint_call", "script_line", "waits_for_others"]

_OURS = ("torch.", "shardwright.", "smdistributed.", "contextlib", "threading")
# Functions that no rank leaves before all of the group have called them.
_JOINT = frozenset(
    "all_gather all_gather_into_tensor all_gather_object all_gather_single all_reduce all_to_all "
    "all_to_all_single barrier monitored_barrier reduce_scatter reduce_scatter_single "
    "reduce_scatter_tensor".split()
)
_MODULE = "torch.distributed.distributed_c10d"
# Functions of these wait for other ranks; what they call waits for them.
_WAITING = ("shardwright.comm.", "torch.distributed.distributed_c10d", "torch.distributed.c10d_logger")
_HELPERS = ("threading", "selectors", "queue", "contextlib")


@dataclass(frozen=True, slots=True)
class JointCall:
    """A function of `torch.distributed` that a rank is in, and that all ranks of a group must call.

    Attributes:
        ranks: world ranks of the group.
        group: name of the group, the same on all of them.
        number: how many collectives it has begun in that group, this one among them; None where nobody
            counts.
        counts_messages: whether sends and receives are counted, too.
    """

    function: str
    ranks: tuple[int, ...]
    group: str
    number: int | None
    counts_messages: bool = False


def script_line(frame: FrameType) -> str:
    """``file:line`` of the innermost function that is neither PyTorch's nor ours; empty where none is."""
    current: FrameType | None = frame
    while current is not None:
        module = current.f_globals.get("__name__", "")
        if not module.startswith(_OURS) and module != "torch":
            return f"{current.f_code.co_filename}:{current.f_lineno}"
        current = current.f_back
    return ""


def waits_for_others(frame: FrameType) -> bool:
    """Whether a thread is in a function that waits for messages of other ranks."""
    current: FrameType | None = frame
    while current is not None and current.f_globals.get("__name__", "") in _HELPERS:
        current = current.f_back
    return current is not None and current.f_globals.get("__name__", "").startswith(_WAITING)


def joint_call(frame: FrameType) -> JointCall | None:
    """The function of `torch.distributed` that a thread is in and that all ranks of a group must call."""
    current: FrameType | None = frame
    found = None
    while current is not None:
        name = current.f_code.co_name
        if current.f_globals.get("__name__") == _MODULE and name in _JOINT:
            found = current  # the outermost one: all_gather_object calls all_gather
        current = current.f_back
    if found is None:
        return None
    group = found.f_locals.get("group")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        return None
    ranks = _ranks_of(group)
    if not ranks:
        return None
    return JointCall(
        found.f_code.co_name,
        ranks,
        group.group_name,
        number_of_collectives(group),
        counts_messages=counts_messages(group),
    )


def collectives_made(name: str, ranks: tuple[int, ...]) -> int | None:
    """The number of collectives that this rank has begun in a group."""
    group = group_named(name)
    return None if group is None or _ranks_of(group) != ranks else number_of_collectives(group)


def _ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """World ranks; none where the group is gone: the script goes on while another thread looks."""
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return ()
