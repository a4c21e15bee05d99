"""The process group of all ranks: how it begins and how it ends."""

import atexit
import itertools
import os
import socket
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from shardwright.comm.generation import agree_on_generation
from shardwright.comm.launch_environment import LaunchEnvironment
from shardwright.errors import LaunchError, UsageError
from shardwright.units import format_seconds

__all__ = [
    "default_store",
    "destroy_process_group",
    "end_with_process",
    "group_of",
    "groups_in_doubt",
    "init_process_group",
    "leave_groups_in_doubt",
    "stay_on_this_host",
    "tell_all",
]

# Counts the groups that this process has made, as all ranks do in the same order: none may find the keys of
# the one before.
_NUMBER_OF_GROUP = itertools.count()


@dataclass(slots=True)
class _Groups:
    """The further groups of this process.

    Attributes:
        default: the default group with which they were made.
        in_doubt: a step failed in its middle, so that messages may be under way that nobody took.
        made: by ranks, use, timeout and backend.
    """

    default: dist.ProcessGroup | None = None
    in_doubt: bool = False
    made: dict[tuple[Any, ...], dist.ProcessGroup] = field(default_factory=dict)


_GROUPS = _Groups()

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
    """Joins all ranks in torch.distributed's default process group.

    Under torchrun the ranks meet at the store that it serves, otherwise at one that rank 0 serves. All keys
    get a prefix that is new after each restart: without it ranks that torchrun restarts after a failure read
    the addresses of dead ones. When the interpreter ends, the group is destroyed.

    Args:
        environment: which rank this is, from `shardwright.comm.environment.detect`.
        backend: as in ``torch.distributed.init_process_group``.
        timeout_s: how long the start, and later each operation, may take.
        device: the accelerator that this rank uses, to bind the group to it.

    Returns:
        The store of this group, for other keys.

    Raises:
        UsageError: there is a default process group already.
        LaunchError: the ranks could not meet.
    """
    if dist.is_initialized():
        raise UsageError("There is a default process group already. Call destroy_process_group() before.")
    if environment.num_nodes == 1:
        stay_on_this_host()
    store = _store(environment, timeout_s=timeout_s)
    generation = agree_on_generation(store, environment, timeout_s=timeout_s)
    prefix = f"generation/{generation}/{next(_NUMBER_OF_GROUP)}"
    own_store = PrefixStore(prefix, store)
    begun_s = time.monotonic()
    try:
        dist.init_process_group(
            backend,
            store=own_store,
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device is not None and device.type != "cpu" else None,
        )
    except (RuntimeError, ValueError) as error:
        waited_s = time.monotonic() - begun_s
        raise LaunchError(
            f"{environment} could not join the {backend} process group "
            f"{_why_not(waited_s, timeout_s=timeout_s)}. Look into the logs of the others first. "
            f"PyTorch says: {error}"
        ) from error
    end_with_process()
    return own_store


def _why_not(waited_s: float, *, timeout_s: float) -> str:
    """Whether the time is over, or something else has ended the wait before."""
    if waited_s >= timeout_s:
        return f"within {timeout_s:g} s: another rank did not come"
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

    Args:
        ranks: its world ranks.
        use: what it is for; groups of the same ranks for different uses do not share their messages.
        timeout_s: after so much time a silent rank counts as lost; PyTorch would give it half an hour.
        backend: of torch.distributed; None for that of the default group.
    """
    if _GROUPS.default is not dist.group.WORLD:
        _GROUPS.default = dist.group.WORLD
        _GROUPS.made.clear()
        end_with_process()
    key = (tuple(ranks), use, timeout_s, backend)
    if key not in _GROUPS.made:
        _GROUPS.made[key] = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s), backend=backend)
    return _GROUPS.made[key]


def groups_in_doubt() -> None:
    """Says that a step failed in its middle on this rank."""
    _GROUPS.in_doubt = True


def leave_groups_in_doubt() -> None:
    """Has the next run make its groups anew if a step failed on any rank; collective over all ranks."""
    if not _GROUPS.made:
        return
    said = [False] * dist.get_world_size()
    dist.all_gather_object(said, _GROUPS.in_doubt)
    if any(said):
        _GROUPS.made.clear()
        _GROUPS.in_doubt = False


def tell_all(fact: Any) -> list[Any]:
    """Tells all ranks a fact that can be pickled; collective over all of them.

    Returns:
        What each rank tells, by rank.
    """
    facts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(facts, fact)
    return facts


def default_store() -> Store:
    """The store of the default process group, whoever made it."""
    # There is no public way to ask for it. Tried on torch 2.13.
    return dist.distributed_c10d._get_default_store()


def destroy_process_group() -> None:
    """Ends the default process group, and all others, if there are any."""
    _GROUPS.default = None
    _GROUPS.made.clear()
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


def stay_on_this_host(environ: MutableMapping[str, str] = os.environ) -> None:
    """Has gloo use the loopback interface, for ranks that are all on one host.

    It would look up the host's name, which need not resolve.
    """
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is not None:
        environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _store(environment: LaunchEnvironment, *, timeout_s: float) -> Store:
    if environment.world_size == 1:
        return HashStore()
    host, port = environment.master_addr, environment.master_port
    serves = environment.rank == 0 and not environment.launcher_serves_store
    try:
        socket.getaddrinfo(host, port)
        return TCPStore(
            host,
            port,
            is_master=serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except socket.gaierror as error:
        raise LaunchError(
            f"{environment}: the host name {host!r} does not resolve ({error.strerror}). "
            "Set MASTER_ADDR to a name or an address of rank 0 that all hosts know."
        ) from error
    except (RuntimeError, OSError) as error:
        raise LaunchError(_no_store(environment, serves=serves, timeout_s=timeout_s, error=error)) from error


def _no_store(environment: LaunchEnvironment, *, serves: bool, timeout_s: float, error: Exception) -> str:
    address = f"{environment.master_addr}:{environment.master_port}"
    first_line = str(error).splitlines()[0]
    if serves:
        return (
            f"{environment} cannot serve the store at {address}: {first_line}. "
            "If another job has the port, set MASTER_PORT to a free one."
        )
    whose = "the launcher" if environment.launcher_serves_store else "rank 0"
    return (
        f"{environment} did not reach the store of {whose} at {address} within {timeout_s:g} s: {first_line}."
        " Check that it runs, that MASTER_ADDR and MASTER_PORT are right, and that no firewall is between."
    )
