"""Starts and ends the process group of all ranks, and counts the lives of the job.

After a worker has died, a launcher that restarts the others keeps its key-value store, with the addresses of
dead ranks in it. So each life uses keys of its own, and all ranks must know its number.

The launcher's restart count is not that number: a host whose workers restarted only because another host's
failed, or has come or gone, does not count it. So rank 0 takes the next number and hands it out. Since the
store may hold entries of earlier lives, a rank must prove that it is alive::

    rank r                                       rank 0
    (1) hello/r  := a fresh random token
                                                 (2) number := counter + 1
                                                 (3) until all have confirmed: for each hello/r that is new,
                                                     welcome/<token> := number
    (4) waits for welcome/<token>
    (5) confirm/<number>/r := token

A greeting of a dead rank is answered too, but nobody reads that answer.
"""

import atexit
import contextlib
import itertools
import os
import platform
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    Store,
)

import shardwright
from shardwright.comm.joining.facts import fact_of, facts_of_all
from shardwright.comm.joining.interface import stay_on_this_host, take_interface_towards
from shardwright.comm.joining.run_secret import Seal, seal_of_run
from shardwright.comm.joining.session import Session, begin_session, has_come
from shardwright.comm.joining.store import SealedStore, joined_tcp_store
from shardwright.comm.launch_environment import LaunchEnvironment
from shardwright.comm.launchers import detect
from shardwright.comm.message_names import listed
from shardwright.errors import LaunchError, UsageError
from shardwright.quantities import format_seconds

_PREFIX = "shardwright/generation"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02


def agree_on_generation(store: Store, environment: LaunchEnvironment, *, timeout_s: float) -> int:
    """Returns a number that all ranks of this life, and none of an earlier one, get."""
    if environment.world_size == 1 or not environment.launcher_serves_store:
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
    pause_s = _FIRST_PAUSE_S
    while missing:  # (3)
        for rank in sorted(missing):
            greeting = f"{_PREFIX}/hello/{rank}"
            token = store.get(greeting) if store.check([greeting]) else None
            # Behind the greeting: who has confirmed already may greet again, for the next life.
            if store.check([f"{_PREFIX}/confirm/{number}/{rank}"]):
                missing.remove(rank)
            elif token is not None and token not in answered:
                store.set(f"{_PREFIX}/welcome/{token.decode(errors='replace')}", str(number))
                answered.add(token)
        if time.monotonic() > limit_s:
            raise LaunchError(
                f"Rank 0 waited {timeout_s:g} s at the start, but of {world_size} ranks these did not come: "
                f"{', '.join(map(str, sorted(missing)))}. Look into their logs."
            )
        if missing:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return number


def refuse_mixed_versions(tell_all: Callable[[Any], Sequence[Any]]) -> None:
    """Refuses ranks that do not run the same: they would trace, split or talk in different ways."""
    everyone = tell_all(_versions())
    ranks: dict[str, list[int]] = {}
    for rank, versions in enumerate(everyone):
        ranks.setdefault(versions, []).append(rank)
    if len(ranks) > 1:
        found = "; ".join(f"{_ranks(own)} {versions}" for versions, own in ranks.items())
        raise LaunchError(
            f"the ranks run different versions: {found}. Install the same on every host, for example pip "
            f"install shardwright=={shardwright.__version__} torch=={torch.__version__.partition('+')[0]}"
        )


def _versions() -> str:
    python = ".".join(platform.python_version_tuple()[:2])
    return f"shardwright {shardwright.__version__}, torch {torch.__version__}, Python {python}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown} has" if len(ranks) == 1 else f"ranks {shown} have"


# Counts the groups that this process has made, as all ranks do in the same order: none may find the keys of
# the one before.
_NUMBER_OF_GROUP = itertools.count()
_NUMBER_OF_SESSION = itertools.count()


@dataclass(slots=True)
class _Groups:
    """The further groups of this process.

    Attributes:
        default: the default group with which they were made.
        in_doubt: a step failed in its middle, so that messages may be under way that nobody took.
        session: what all ranks share as long as there is the default group `of_session`.
        store: that of the default group, sealed as far as the session is.
    """

    default: dist.ProcessGroup | None = None
    in_doubt: bool = False
    session: Session | None = None
    of_session: dist.ProcessGroup | None = None
    store: Store | None = None
    made: dict[tuple[Any, ...], dist.ProcessGroup] = field(default_factory=dict)


_GROUPS = _Groups()

_MOST_CONNECTED = 64
"""Ranks of which gloo connects each to each other at once, and so notices at once that one ends.

Among more, two are connected when they talk first, so that a rank asks the store 10 to 50 questions, and not
several for each other rank and group. Then gloo may wait for a rank that has ended before they ever talked
(its issue 520, on torch 2.13): the launcher ends those that wait.
"""

# At the end, threads must be found asleep so often, so long apart.
_LOOKS = 3
_PAUSE_S = 0.002
_LONGEST_REST_S = 1.0


def init_process_group(
    environment: LaunchEnvironment,
    *,
    backend: str,
    timeout_s: float,
    device: torch.device | None = None,
) -> Store:
    """Joins all ranks in torch.distributed's default process group; "auto" is NCCL on GPUs, gloo elsewhere.

    Under torchrun the ranks meet at the store that it serves, otherwise at one that rank 0 serves. All keys
    get a prefix that is new after each restart: without it ranks that torchrun restarts after a failure read
    the addresses of dead ones. When the interpreter ends, the group is destroyed.
    """
    if dist.is_initialized():
        raise UsageError("There is a default process group already. Call destroy_process_group() before.")
    if environment.num_nodes == 1:
        stay_on_this_host()
    else:
        take_interface_towards(environment.master_addr)
    if environment.world_size > _MOST_CONNECTED:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    store = HashStore() if environment.world_size == 1 else joined_tcp_store(environment, timeout_s=timeout_s)
    seal = seal_of_run(os.environ)
    for_generation = store if seal is None else SealedStore(store, seal)
    generation = agree_on_generation(for_generation, environment, timeout_s=timeout_s)
    prefix = f"generation/{generation}/{next(_NUMBER_OF_GROUP)}"
    begun_s = time.monotonic()
    on_gpus = device is not None and device.type != "cpu"
    if backend == "auto":
        backend = "nccl" if on_gpus else "gloo"
    try:
        session = begin_session(
            PrefixStore(f"{prefix}/session", store),
            rank=environment.rank,
            num_ranks=environment.world_size,
            one_host=environment.num_nodes == 1,
            timeout_s=timeout_s,
        )
        own_store = session.store(PrefixStore(prefix, store))
        dist.init_process_group(
            backend,
            store=own_store,
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if on_gpus else None,
        )
    except LaunchError:
        raise
    except (RuntimeError, ValueError) as error:
        waited_s = time.monotonic() - begun_s
        who = _absent(PrefixStore(f"{prefix}/session", store), environment)
        raise LaunchError(
            f"{environment} could not join the {backend} process group "
            f"{_why_not(waited_s, who, timeout_s=timeout_s)}. Look into the logs of the others first. "
            f"PyTorch says: {error}"
        ) from error
    end_with_process()
    _GROUPS.session, _GROUPS.of_session, _GROUPS.store = session, dist.group.WORLD, _stock_store()
    return own_store


def session_of_group(*, timeout_s: float) -> Session:
    """The session of all ranks, for as long as there is this default group; at first collective over them."""
    session = present_session()
    if session is None:
        session = begin_session(
            PrefixStore(f"shardwright/session/{next(_NUMBER_OF_SESSION)}", _stock_store()),
            rank=dist.get_rank(),
            num_ranks=dist.get_world_size(),
            one_host=detect(os.environ).num_nodes == 1,
            timeout_s=timeout_s,
        )
        _GROUPS.session, _GROUPS.of_session = session, dist.group.WORLD
        _GROUPS.store = session.store(_stock_store())
    return session


def present_session() -> Session | None:
    """The session that all ranks share already; None before they have agreed on it."""
    has_one = dist.is_initialized() and _GROUPS.of_session is dist.group.WORLD
    return _GROUPS.session if has_one else None


def seal_of_session() -> Seal | None:
    """The seal of the present session; None where there is none, or its ranks have no secret."""
    session = present_session()
    return None if session is None else session.seal


def _absent(store: Store, environment: LaunchEnvironment) -> str:
    """The ranks that have not come, as far as the store tells."""
    absent: list[int] = []
    with contextlib.suppress(RuntimeError):  # it has gone, with the rank that served it
        absent = [rank for rank in range(environment.world_size) if not has_come(store, rank)]
    if not absent:
        return "another rank"
    return f"rank{'s' * (len(absent) > 1)} {listed(absent)}"


def _why_not(waited_s: float, who: str, *, timeout_s: float) -> str:
    """Whether the time is over, or something else has ended the wait before."""
    if waited_s >= timeout_s:
        return f"within {timeout_s:g} s: {who} did not come"
    return (
        f"and gave up after {format_seconds(waited_s)}, before timeout_s ({timeout_s:g} s) was over: another "
        "rank has most likely failed or ended while it joined"
    )


def group_of(
    ranks: Sequence[int], *, use: str, timeout_s: float, backend: str | None = None
) -> dist.ProcessGroup:
    """A further group; collective over all ranks.

    It is made once and serves all runs of a process, one after the other: each has threads that wake up a
    hundred times a second, for as long as the process lives.
    """
    if _GROUPS.default is not dist.group.WORLD:
        _GROUPS.default = dist.group.WORLD
        _GROUPS.made.clear()
        end_with_process()
    key = (tuple(ranks), use, timeout_s, backend)
    if key not in _GROUPS.made:
        _GROUPS.made[key] = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s), backend=backend)
    return _GROUPS.made[key]


def backend_for(device: torch.device) -> str:
    """The backend by which the default group sends tensors of a device; empty where it has none for it."""
    # "undefined" is what get_backend says of a group made without a name, which has one for each device.
    backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
    return backends.get(device.type, "")


def groups_in_doubt() -> None:
    """Says that a step failed in its middle on this rank."""
    _GROUPS.in_doubt = True


def leave_groups_in_doubt() -> None:
    """Has the next run make its groups anew if a step failed on any rank; collective over all ranks."""
    if not _GROUPS.made:
        return
    if any(tell_all(_GROUPS.in_doubt)):
        _GROUPS.made.clear()
        _GROUPS.in_doubt = False


def tell_all(fact: Any, *, group: dist.ProcessGroup | None = None, **how: Any) -> list[Any]:
    """Tells all ranks of a group a fact; collective over them. `how`: see `facts_of_all`."""
    return facts_of_all(fact, seal=seal_of_session(), group=group, **how)


def tell_from(source: int, fact: Any) -> Any:
    """A fact of one rank, on all of them; collective over all ranks."""
    return fact_of(source, fact, seal=seal_of_session())


def default_store() -> Store:
    """The store of the default process group, whoever made it; sealed if there is a session with a secret."""
    return _GROUPS.store if present_session() is not None and _GROUPS.store is not None else _stock_store()


def _stock_store() -> Store:
    # There is no public way to ask for it. Tried on torch 2.13.
    return dist.distributed_c10d._get_default_store()


def destroy_process_group() -> None:
    """Ends the default process group, and all others, if there are any."""
    _GROUPS.default = None
    _GROUPS.made.clear()
    # The session stays until there is another: a group of the script's may ask for its store to the end.
    _GROUPS.of_session = None
    if dist.is_initialized():
        dist.destroy_process_group()


def end_with_process() -> None:
    """Has all groups destroyed, and their threads come to rest, when the interpreter ends; see `_end`."""
    atexit.unregister(_end)
    atexit.register(_end)


def _end() -> None:
    """Ends all groups before the interpreter ends, and lets their threads come to rest.

    The threads of a group live on while anything refers to it, as a script's model does. One that lets go of
    a tensor just now needs the interpreter for it; Python 3.13 and older end a thread that asks for an
    interpreter that is ending, and C++ takes that for an error: "terminate called without an active
    exception", and the process aborts.
    """
    destroy_process_group()
    deadline_s = time.monotonic() + _LONGEST_REST_S
    looks = 0
    while looks < _LOOKS and time.monotonic() < deadline_s:
        time.sleep(_PAUSE_S)  # lets go of the interpreter, so that whoever waits for it gets it
        looks = looks + 1 if _threads_rest() else 0


def _threads_rest() -> bool:
    """Whether every thread of gloo sleeps; true where the kernel does not tell."""
    for file in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = file.read_text(errors="replace").partition("(")[2].rpartition(")")
        except OSError:  # it has just ended
            continue
        if "gloo" in name and rest.split()[0] != "S":
            return False
    return True
