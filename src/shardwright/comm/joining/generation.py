"""Agrees on the generation of the job: its number of lives so far, as all ranks see it.

After a worker has died, a launcher that restarts the others keeps its key-value store, with the addresses of
dead ranks in it. So each life uses keys of its own, and all ranks must know its number.

On one host the launcher's restart count is that number. Over several hosts the counts may differ: a host
whose workers restarted only because another host's failed does not count it. Then rank 0 takes the next
number and hands it out. Since the store may hold entries of earlier lives, a rank must prove that it is
alive::

    rank r                                       rank 0
    (1) hello/r  := a fresh random token
                                                 (2) number := counter + 1
                                                 (3) until all have confirmed: for each hello/r that is new,
                                                     welcome/<token> := number
    (4) waits for welcome/<token>
    (5) confirm/<number>/r := token

A greeting of a dead rank is answered too, but nobody reads that answer.
"""

import time
import uuid

from torch.distributed import Store  # type: ignore[attr-defined]

from shardwright.comm.identity.launch_environment import LaunchEnvironment
from shardwright.errors import LaunchError
from shardwright.quantities import format_seconds

__all__ = ["agree_on_generation"]

_PREFIX = "shardwright/generation"
_POLL_S = 0.02


def agree_on_generation(store: Store, environment: LaunchEnvironment, *, timeout_s: float) -> int:
    """Returns a number that all ranks of this life, and none of an earlier one, get."""
    if environment.num_nodes == 1 or not environment.launcher_serves_store:
        return environment.restart_count
    if environment.rank == 0:
        return _hand_out(store, environment.world_size, timeout_s=timeout_s)
    begun_s = time.monotonic()
    try:
        return _ask(store, environment.rank)
    except LaunchError:
        raise
    except RuntimeError as error:
        waited = format_seconds(time.monotonic() - begun_s)
        raise LaunchError(
            f"{environment} waited {waited} at the start (timeout_s is {timeout_s:g}), but rank 0 did not "
            "come. Look into its log."
        ) from error


def _ask(store: Store, rank: int) -> int:
    token = uuid.uuid4().hex
    store.set(f"{_PREFIX}/hello/{rank}", token)  # (1)
    number = _number(store.get(f"{_PREFIX}/welcome/{token}"))  # (4)
    store.set(f"{_PREFIX}/confirm/{number}/{rank}", token)  # (5)
    return number


def _number(text: bytes) -> int:
    if not text.isdigit() or len(text) > 18:
        raise LaunchError(
            f"{text[:40]!r} stands in the run's store where rank 0 writes the number of this life of the "
            "ranks: a stranger has written it. Keep strangers off the network between the hosts."
        )
    return int(text)


def _hand_out(store: Store, world_size: int, *, timeout_s: float) -> int:
    number = int(store.add(f"{_PREFIX}/counter", 1))  # (2)
    missing = set(range(1, world_size))
    answered: set[bytes] = set()
    limit_s = time.monotonic() + timeout_s
    while missing:  # (3)
        for rank in sorted(missing):
            greeting = f"{_PREFIX}/hello/{rank}"
            if store.check([f"{_PREFIX}/confirm/{number}/{rank}"]):
                missing.remove(rank)
            elif store.check([greeting]) and (token := store.get(greeting)) not in answered:
                store.set(f"{_PREFIX}/welcome/{token.decode(errors='replace')}", str(number))
                answered.add(token)
        if time.monotonic() > limit_s:
            raise LaunchError(
                f"Rank 0 waited {timeout_s:g} s at the start, but of {world_size} ranks these did not come: "
                f"{', '.join(map(str, sorted(missing)))}. Look into their logs."
            )
        time.sleep(_POLL_S if missing else 0.0)
    return number
