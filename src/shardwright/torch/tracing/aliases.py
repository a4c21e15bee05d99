"""Follows changes in place through all names of one memory, as far as somebody reads them.

A tensor that is changed in place gets a new value in the graph, and so does every tensor that shares its
memory::

    last = x[:, -1]      x: v1, last: v2
    last.add_(1.0)       x: v3, last: v4      one step that changes two tensors
    y = head(x)          reads v3
"""

from collections.abc import Iterable, Sequence

from torch import Tensor

from shardwright.runtime.traced import Change, View
from shardwright.torch._private import storage_key
from shardwright.torch.tracing.recorded_step import Step

__all__ = ["follow_changes", "view_of"]


def view_of(tensor: Tensor) -> View:
    """The place of a tensor in memory."""
    return View(
        memory=storage_key(tensor),
        size=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        offset=int(tensor.storage_offset()),
        dtype=tensor.dtype,
    )


def follow_changes(steps: Sequence[Step], results: Iterable[int]) -> None:
    """Drops changes that nobody reads, and finds for the others what they are views of.

    Args:
        steps: of a whole trace, whose `changes` are shortened and `bases` filled in.
        results: values that are needed at the end: the loss, and what the step function returns.
    """
    live = set(results)
    for step in reversed(steps):
        if step.changes:
            kept = tuple(c for c in step.changes if c.position is not None or c.after in live)
            step.bases = _bases(kept, step.changes)
            step.changes = kept
            live.update(c.before for c in (*kept, *step.bases) if c.before is not None)
        live.update(value for _, value in step.reads)


def _bases(kept: Sequence[Change], every: Sequence[Change]) -> tuple[Change, ...]:
    found = []
    for memory in dict.fromkeys(change.view.memory for change in kept):
        views = [change.view for change in kept if change.view.memory == memory]
        if len(views) == 1:
            continue
        known = [c for c in (*kept, *every) if c.view.memory == memory and c.before is not None]
        base = next((c for c in known if all(c.view.covers(view) for view in views)), None)
        if base is not None:
            found.append(base)
    return tuple(found)
