"""Ends ranks whose data runs out at different steps: together, or with an error that names the rank.

::

    rank 0   step 1   step 2   step 3   leaves its loop ──► "no more" ──┐
    rank 1   step 1   step 2   step 3   step 4: asks ─────► "one more" ─┴─► some rank has no more: leaves, too

Outside `joined`, no rank asks: one that waits in vain in step 4 finds out where the others are.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

from shardwright.comm.identity.purpose import Purpose
from shardwright.comm.identity.rank_set import listed
from shardwright.errors import PeerLostError, UsageError
from shardwright.torch.run.context import Context
from shardwright.torch.run.failure import first_cause_named

__all__ = ["STEP", "TogetherUntil", "out_of_data"]

STEP = "the step function"
"""The beginning of every step's `MeetingPlace.where`."""


class _DataEnded(BaseException):
    """Leads out of the loop of a rank that has more data than another; no error that a script may catch."""


class TogetherUntil:
    """Gives all ranks the same number of training steps, that of the rank with the least data.

    Args:
        context: the run.
    """

    def __init__(self, context: Context):
        self._context = context
        self._is_inside = False

    @contextmanager
    def joined(self, *, throws: bool) -> Iterator[None]:
        """Around a training loop, on all ranks.

        Args:
            throws: end with an error where one rank has less data.

        Raises:
            UsageError: that is the case.
        """
        if self._is_inside:
            raise UsageError("model.join() is entered inside of another one. Enter it once around the loop.")
        self._is_inside = True
        try:
            yield
            ended = self._told(has_more=False)
        except _DataEnded as end:
            (ended,) = end.args
        finally:
            self._is_inside = False
        reporter = self._context.reporter
        assert reporter is not None
        if len(ended) == self._context.mesh.world_size:
            return
        text = f"{_ranks(ended)} ran out of data after step {reporter.num_steps}, and others have more"
        if throws:
            raise UsageError(f"{text}. model.join() was told to throw then (throw_on_early_termination).")
        reporter.observer.status(f"shardwright: {text}: all stop")

    def begin_step(self) -> None:
        """Leaves the loop where another rank has no data for a step; collective over all ranks inside."""
        if self._is_inside and torch.is_grad_enabled():
            ended = self._told(has_more=True)
            if ended:
                raise _DataEnded(ended)

    def _told(self, *, has_more: bool) -> list[int]:
        """The ranks that have no more data."""
        context = self._context
        if context.links.world is None:
            return [] if has_more else [0]
        row = torch.tensor(float(has_more), device=context.device)
        with first_cause_named(context):
            rows = context.links.world.gather(row, Purpose.AGREEMENT).tolist()
        return [rank for rank, more in enumerate(rows) if not more]


def out_of_data(context: Context, error: PeerLostError | UsageError) -> PeerLostError | UsageError:
    """The error of a rank that waits in vain, with who ran out of data, where that is why.

    Args:
        context: the run.
        error: what has come of waiting: in a training step a `PeerLostError`, in a call behind the loop a
            `UsageError`.
    """
    whereabouts, reporter = context.watch.whereabouts, context.reporter
    if whereabouts is None or reporter is None:
        return error
    done, in_step = reporter.num_steps, isinstance(error, PeerLostError)
    others = [rank for rank in range(context.mesh.world_size) if rank != context.rank]
    try:
        notes = {rank: note for rank in others if (note := whereabouts.of(rank)) and note.steps == done}
    except RuntimeError:  # the store has gone, with the rank that served it
        return error
    blame = context.watch.blame
    failed = {rank for rank in notes if blame is not None and blame.has_failed(rank)}  # and caught its error
    gone = {rank for rank, note in notes.items() if note.ended and not note.failed} - failed
    going_on = {rank for rank, note in notes.items() if note.place and note.place.where.startswith(STEP)}
    (going_on if in_step else gone).add(context.rank)
    if not gone or not going_on:
        return error
    text = (
        f"{_ranks(gone)} ran out of data, or left the loop, after step {done}, and {_ranks(going_on)} began "
        f"step {done + 1}: a step is made by all ranks. Give all ranks as many batches (sw.data_loader "
        "does), or put the loop into `with model.join():`, which ends it on all of them together."
    )
    return type(error)(
        f"{text} {error}", **({"rank": error.rank} if isinstance(error, PeerLostError) else {})
    )


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(sorted(ranks))}"
