"""Faults on purpose: what a run does when a rank dies, hangs or is slow, tried before it happens.

A file says what happens, on which rank, in which step and phase of it::

    faults:
      - {kind: kill, rank: 1, step: 20, phase: backward}
      - {kind: slow, rank: 0, step: 5, seconds: 0.4}
    random: {seed: 7, every_s: 60, kinds: [kill, stop, pause]}

``shardwright run --chaos faults.yaml train.py`` has it happen, and so does the variable ``SHARDWRIGHT_CHAOS``
with the path of the file, under any launcher. Ranks note what they did in ``faults.jsonl``, in the run folder
or else beside the file: a fault comes once, however often the ranks start again, unless it has ``again``.
"""

import ctypes
import errno
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from shardwright.errors import ConfigError
from shardwright.files.user_file import Positive, Record, UserFile
from shardwright.quantities import MOST_NODES, MOST_RANKS_OF_HOST, MOST_SECONDS

__all__ = ["CHAOS", "RANDOM_PHASES", "Fault", "Faults", "Kind", "Phase", "RandomFaults", "happen"]

CHAOS = "SHARDWRIGHT_CHAOS"
"""The variable with the path of the file."""

_Random = Literal["kill", "stop", "spin", "gil", "exit", "raise", "lone_collective", "slow", "pause"]
Kind = Literal[_Random, "link_down", "full_disk"]
"""What happens to a rank:

- ``kill``: SIGKILL, as when memory runs out; ``exit``: it leaves with code 0, and says nothing;
- ``raise``: an error in the script;
- ``stop``: SIGSTOP; ``spin``: a loop without end; ``gil``: C code that keeps Python's lock;
- ``lone_collective``: it calls a collective that no other rank calls, between steps;
- ``slow``: so many seconds longer in each step from then on; ``pause``: once;
- ``link_down``: its network interface is down (in a network namespace, as root);
- ``full_disk``: no space is left where it saves.
"""

Phase = Literal["init", "start", "forward", "backward", "update", "save", "end"]
"""When: as ``sw.init`` begins, before the first step of the process, in a step, or after the last one."""

RANDOM_PHASES: tuple[Phase, ...] = ("forward", "backward", "update")
_IN_STEPS = ("forward", "backward", "update", "save")
_TIMED = ("slow", "pause")
_WITH_SECONDS = (*_TIMED, "stop", "spin", "gil", "link_down")
_FOR_EVER_S = 10.0**6

_Seconds = Annotated[float, Field(gt=0, le=MOST_SECONDS)]


def _underscored(value: Any) -> Any:
    return value.replace("-", "_") if isinstance(value, str) else value


class Fault(Record):
    """One fault.

    Attributes:
        step: the first step in which it may happen, counted from 1 over restarts.
        again: it happens each time that the ranks start, and not once.
    """

    kind: Kind
    rank: Annotated[int, Field(ge=0, lt=MOST_RANKS_OF_HOST * MOST_NODES)]
    step: Annotated[int, Field(ge=1)] | None = None
    phase: Phase = "forward"
    seconds: _Seconds | None = None
    again: bool = False

    _kind = field_validator("kind", mode="before")(_underscored)

    @model_validator(mode="after")
    def _fits(self) -> "Fault":
        if self.kind in _TIMED and self.seconds is None:
            raise ValueError(f"{self.kind} needs seconds")
        if self.seconds is not None and self.kind not in _WITH_SECONDS:
            raise ValueError(f"{self.kind} takes no seconds")
        if self.step is not None and self.phase not in _IN_STEPS:
            raise ValueError(f"phase {self.phase} is outside of steps, so leave step out")
        if self.kind == "full_disk" and self.phase != "save":
            raise ValueError("full_disk is for phase save")
        if self.kind == "lone_collective" and self.phase not in ("start", "update", "end"):
            raise ValueError("lone_collective is for phases start, update and end: the script is there")
        return self


class RandomFaults(Record):
    """Faults one after the other, drawn by a seed: any rank and kind, in a step.

    Attributes:
        every_s: seconds on average from the first step after a start, or from the last fault, to the next.
    """

    seed: int = 0
    every_s: Positive = 60.0
    kinds: tuple[_Random, ...] = Field(
        tuple(kind for kind in get_args(_Random) if kind != "slow"), min_length=1
    )
    seconds: _Seconds = 2.0
    most: Annotated[int, Field(ge=0)] | None = None

    def drawn(self, number: int, world_size: int) -> tuple[Fault, float]:
        """The fault of a number from 0, and after how many seconds it comes."""
        draw = random.Random(f"{self.seed}/{number}")
        kind = draw.choice(self.kinds)
        fault = Fault(
            kind=kind,
            rank=draw.randrange(world_size),
            step=1,
            phase="update" if kind == "lone_collective" else draw.choice(RANDOM_PHASES),
            seconds=self.seconds if kind in _TIMED else None,
        )
        return fault, self.every_s * draw.uniform(0.5, 1.5)


class Faults(Record):
    """What a file says."""

    faults: tuple[Fault, ...] = ()
    random: RandomFaults | None = None

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Faults":
        """Reads YAML or JSON."""
        file = UserFile(path, what="chaos file", error=ConfigError)
        return file.model(cls, file.read_yaml() or {})

    def check(self, world_size: int) -> None:
        """Refuses ranks that the run has not, and faults that this machine cannot have."""
        last = max((fault.rank for fault in self.faults), default=0)
        if last >= world_size:
            raise ConfigError(
                f"a fault is for rank {last}, but the ranks are 0 to {world_size - 1}. Name one of them, or "
                f"start more: shardwright run -n {last + 1}"
            )
        kinds = {fault.kind for fault in self.faults}
        if "link_down" in kinds and (missing := missing_for_links()):
            raise ConfigError(
                f"link_down cannot be had here: {missing}. Hosts with links of their own: "
                "shardwright.testing.cluster"
            )


def missing_for_links() -> str:
    """Why no link of this process may be taken down; empty where one may."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        return "it takes root, and ip (of iproute2)"
    found = subprocess.run(["ip", "netns", "identify"], capture_output=True, check=False)
    return "" if found.stdout.strip() else "this network may be the machine's: it is no namespace of ip netns"


def happen(kind: Kind, seconds: float | None = None) -> None:
    """Has a fault happen to this process, here and now; see `Kind`. For tests, and scripts of your own.

    Example:
        >>> happen("pause", 0.01)
        >>> happen("raise")
        Traceback (most recent call last):
            ...
        RuntimeError: a fault on purpose
    """
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "exit":
        os._exit(0)
    elif kind == "raise":
        raise RuntimeError("a fault on purpose")
    elif kind == "stop":
        _later(seconds, f"kill -CONT {os.getpid()}")
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "spin":
        end_s = time.monotonic() + (seconds or _FOR_EVER_S)
        while time.monotonic() < end_s:
            pass
    elif kind == "gil":
        _hold_python(seconds or _FOR_EVER_S)
    elif kind in _TIMED:
        time.sleep(seconds or 1.0)
    elif kind == "lone_collective":
        _call_alone()
    elif kind == "full_disk":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    else:
        _take_link_down(seconds)


def _later(seconds: float | None, command: str) -> None:
    """Has a shell do something after so long, when this process may not; never, where that is None."""
    if seconds is not None:
        subprocess.Popen(["/bin/sh", "-c", f"sleep {seconds:f}; {command}"], start_new_session=True)


def _hold_python(seconds: float) -> None:
    """Waits in C for a lock that this thread has, and which no signal ends, with Python's lock."""
    lock = ctypes.create_string_buffer(128)
    until = (ctypes.c_long * 2)(*divmod(time.time_ns() + int(seconds * 1e9), 10**9))
    library = ctypes.PyDLL(None)
    library.pthread_mutex_lock(lock)
    library.pthread_mutex_timedlock(lock, until)


def _call_alone() -> None:
    import torch

    torch.distributed.all_reduce(torch.ones(3), group=torch.distributed.group.WORLD)


def _take_link_down(seconds: float | None) -> None:
    if missing := missing_for_links():
        raise ConfigError(f"no link is taken down: {missing}.")
    for _, name in socket.if_nameindex():
        if name != "lo":
            _later(seconds, f"ip link set {name} up")
            subprocess.run(["ip", "link", "set", name, "down"], check=True)
