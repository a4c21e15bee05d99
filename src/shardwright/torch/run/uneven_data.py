"""Names the rank whose data ran out, to those that wait for it in a step in vain."""

from collections.abc import Collection

from shardwright.comm.identity.rank_set import listed
from shardwright.errors import PeerLostError, UsageError
from shardwright.torch.run.context import Context

__all__ = ["STEP", "out_of_data"]

STEP = "the step function"
"""The beginning of every step's `MeetingPlace.where`."""


def out_of_data(context: Context, error: PeerLostError | UsageError) -> PeerLostError | UsageError:
    """The error of a rank that waits in vain, with who ran out of data, where that is why."""
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
        "does), or end the loop on all ranks after the batches of the shortest."
    )
    return type(error)(
        f"{text} {error}", **({"rank": error.rank} if isinstance(error, PeerLostError) else {})
    )


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(sorted(ranks))}"
