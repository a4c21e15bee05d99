"""Calls that several ranks make together: waits for all ranks, and names the missing."""

import datetime
import itertools
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

from shardwright.comm.joining.process_group import default_store, groups_in_doubt
from shardwright.comm.joining.store import limit_silence
from shardwright.comm.message_names import names_a_lost_peer
from shardwright.comm.roll_call import Call, RollCall
from shardwright.comm.whereabouts import Stalls, Whereabouts
from shardwright.errors import CheckpointError, PeerLostError, UsageError
from shardwright.run.context import Context, context, is_initialized
from shardwright.run.failure import first_cause_named, out_of_data

_T = TypeVar("_T")

_RUNS = itertools.count()
_LONGEST_SILENCE_S = 30.0
_PATIENCE = datetime.timedelta(seconds=20)


def prepare(made: Context) -> None:
    """Gives a run what its ranks find each other with; on all ranks, in the same order."""
    run = next(_RUNS)
    if made.mesh.world_size == 1:
        return
    store: Any = default_store()  # whose type, as PyTorch declares it, lacks clone()
    made.watch.whereabouts = whereabouts = Whereabouts(
        store,
        rank=made.rank,
        run=run,
        confess=partial(_confess, made),
        stalls=lambda said: Stalls(made.rank, made.config.missing_ranks_s, said, _tell_of_a_stall),
        limit_silence=partial(limit_silence, store, min(made.config.timeout_s / 2, _LONGEST_SILENCE_S)),
    )
    made.watch.roll_call = RollCall(
        store,
        whereabouts,
        rank=made.rank,
        patience_s=made.config.missing_ranks_s,
        timeout_s=made.config.timeout_s,
        local=made.links.local_peers,
        tell=lambda text: warnings.warn(text, stacklevel=2),
    )
    whereabouts.watch()


def _tell_of_a_stall(text: str) -> None:
    sys.stderr.write(f"shardwright: {text}\n")
    sys.stderr.flush()


def _confess(made: Context, error: BaseException) -> None:
    """Says why the script of this rank ends, unless that is another rank's doing."""
    consequence = isinstance(error, PeerLostError) or names_a_lost_peer(str(error))
    if made.watch.blame is not None and not consequence:
        made.watch.blame.confess(error)


def script_ended(error: BaseException | None) -> None:
    """Says that the script of this rank has ended, where the interpreter's end does not."""
    if is_initialized() and (whereabouts := context().watch.whereabouts) is not None:
        whereabouts.script_ended(error)


def meet(where: str, ranks: Sequence[int] | None = None) -> None:
    """Returns when all ranks have come to a call; does nothing where there is one rank."""
    meet_each([Call(where, tuple(range(context().mesh.world_size) if ranks is None else ranks))])


def meet_each(calls: Sequence[Call]) -> None:
    """Returns when all ranks have come to all of these calls; none of them waits for another one."""
    current = context()
    if current.watch.roll_call is None:
        return
    with first_cause_named(current):
        try:
            current.watch.roll_call.meet_each(calls)
        except UsageError as error:
            groups_in_doubt()
            raise out_of_data(current, error) from error
        except BaseException:
            groups_in_doubt()
            raise


def call_together(where: str, ranks: Sequence[int], *, hint: str = "") -> AbstractContextManager[Any]:
    """A context for a call that several ranks make together, and in which they wait for each other anyway."""
    whereabouts = context().watch.whereabouts
    if whereabouts is None or len(ranks) < 2:
        return nullcontext()
    return whereabouts.inside(where, ranks, hint=hint)


def on_every_rank(run: Context, make: Callable[[], _T]) -> _T:
    """Makes something on every rank, or on none if one rank cannot; collective over all ranks."""
    made: list[_T] = []
    problem = ""
    try:
        made.append(make())
    except CheckpointError as error:
        problem = str(error)
    except Exception as error:  # of the script's own objects, or no memory for the copies
        problem = f"rank {run.rank}: {type(error).__name__}: {error}"
    first = next((each for each in run.from_all_ranks(problem) if each), None)
    if first is not None:
        raise CheckpointError(first)
    return made[0]


def ranks_with_the_model() -> tuple[int, ...]:
    """World ranks that together have all elements of the model once, with this one among them."""
    current = context()
    return current.mesh.group(("pp", "dp_shard", "cp", "ep", "tp"), current.rank)
