"""One job in the fork server: forks the ranks, serves their store, watches them, ends them.

It is a process of its own so that a dying rank takes no store with it, and so that the fork server stays
without threads. Every job gets an empty store, so it never sees another job's keys. Ranks use it only if
their function makes its process group itself.
"""

import contextlib
import os
import select
import signal
import socket
import time
from pathlib import Path
from typing import NoReturn

from shardwright.launch.processes import children, die_with_parent, is_stopped, kill_group
from shardwright.testing.job import Job, RankFiles, RankStatus, StopReason
from shardwright.testing.nursery import Nursery, belongs_to_nursery
from shardwright.testing.rank import STACKS_SIGNAL, Gate, run_rank


class StoreProcess:
    """Forks the process and asks it for stores."""

    def __init__(self, server_pid: int) -> None:
        self._channel, other_end = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self._channel.close()
            _serve(other_end, server_pid=server_pid)
        other_end.close()

    def renew(self) -> int:
        """Returns the port, on 127.0.0.1, of a store without keys, after dropping one that was used."""
        self._channel.sendall(b"n")
        answer = self._channel.recv(16)
        if not answer:
            raise ConnectionError(f"the store process {self.pid} has ended")
        return int(answer)

    def close(self) -> None:
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def forget(self) -> None:
        """Closes the channel in a forked rank, which must not hold it."""
        self._channel.close()


def _serve(channel: socket.socket, *, server_pid: int) -> NoReturn:
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(server_pid)
        # It imports torch, as the fork server has.
        from shardwright.comm.joining.store import loopback_tcp_store

        store, num_own_keys = None, 0
        while channel.recv(1):
            if store is None or store.num_keys() != num_own_keys:
                store = None  # the old one goes first: that frees its port and its thread
                store = loopback_tcp_store()
                num_own_keys = store.num_keys()
            channel.sendall(str(store.port).encode())
        status = 0
    finally:
        os._exit(status)


_STACKS_WAIT_S = 1.0
_REAP_WAIT_S = 5.0


class CallerGoneError(Exception):
    """The process that asked for the job has ended."""


class Run:
    """The ranks of one job.

    Args:
        channel: the socket to the caller; if it becomes readable during a job, the caller has gone.
        wakeup_fd: becomes readable when a child ends.
        nursery: forks ranks with another hash seed; None where this process forks all.
    """

    def __init__(
        self,
        job: Job,
        *,
        store: StoreProcess,
        channel: socket.socket,
        wakeup_fd: int,
        nursery: Nursery | None = None,
    ) -> None:
        self._job = job
        self._nursery = nursery
        self._store = store
        self._channel = channel
        self._wakeup_fd = wakeup_fd
        self._rank_of: dict[int, int] = {}
        self._started_at_s: dict[int, float] = {}
        self._stopped: dict[int, StopReason] = {}
        self._statuses: dict[int, RankStatus] = {}
        self._held: set[int] = set()
        self._first_failure_at_s: float | None = None
        self._start, self._finish = Gate(), Gate()

    def statuses(self, *, caller_pid: int) -> list[RankStatus]:
        """Runs the job to its end.

        Raises:
            CallerGoneError: the caller ended before the job did; nothing is left running.
        """
        try:
            self._fork_all()
            self._watch(caller_pid)
        finally:
            self._end_all()
        return [self._statuses[rank] for rank in range(self._job.num_ranks)]

    def _fork_all(self) -> None:
        port = str(self._store.renew())
        for environ in self._job.environ:
            environ.setdefault("MASTER_PORT", port)
        of_nursery = [
            rank
            for rank in range(self._job.num_ranks)
            if self._nursery is not None and belongs_to_nursery(rank)
        ]
        server_pid = os.getpid()
        for rank in sorted(set(range(self._job.num_ranks)).difference(of_nursery)):
            self._started_at_s[rank] = time.monotonic()
            pid = os.fork()
            if pid == 0:
                self._become(rank, server_pid)
            with contextlib.suppress(
                PermissionError, ProcessLookupError
            ):  # the child may have done it already
                os.setpgid(pid, pid)
            self._rank_of[pid] = rank
        if of_nursery:
            assert self._nursery is not None
            self._started_at_s.update(dict.fromkeys(of_nursery, time.monotonic()))
            pids = self._nursery.fork(self._job, of_nursery, (self._start, self._finish))
            self._rank_of.update((pid, rank) for rank, pid in pids.items())
        for gate in (self._start, self._finish):
            gate.keep_server_ends()

    def _become(self, rank: int, server_pid: int) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            os.setpgid(0, 0)
            self._channel.close()
            self._store.forget()
            if self._nursery is not None:
                self._nursery.forget()
            os.close(self._wakeup_fd)
            for gate in (self._start, self._finish):
                gate.keep_rank_ends()
            run_rank(self._job, rank, server_pid=server_pid, start=self._start, finish=self._finish)
        finally:
            os._exit(1)  # else a failure above would leave a second server behind

    def _watch(self, caller_pid: int) -> None:
        deadline_s = time.monotonic() + self._job.timeout_s
        while self._rank_of:
            limit_s, reason = self._next_limit(deadline_s)
            if time.monotonic() >= limit_s:
                self._stop_all(reason)
                return
            self._wait(limit_s, caller_pid)
            self._reap()
            for gate in (self._start, self._finish):
                gate.open_if_complete(num_ranks=self._job.num_ranks, ended=self._statuses)

    def _next_limit(self, deadline_s: float) -> tuple[float, StopReason]:
        if self._first_failure_at_s is not None and self._job.grace_s is not None:
            end_of_grace_s = self._first_failure_at_s + self._job.grace_s
            if end_of_grace_s < deadline_s:
                return end_of_grace_s, "grace"
        return deadline_s, "timeout"

    def _wait(self, limit_s: float, caller_pid: int) -> None:
        gates = {gate.arrivals_fd: gate for gate in (self._start, self._finish) if not gate.is_open}
        channel_fd = self._channel.fileno()
        wait_s = min(max(limit_s - time.monotonic(), 0.0), 1.0)
        ready, _, _ = select.select([channel_fd, self._wakeup_fd, *gates], [], [], wait_s)
        if channel_fd in ready or os.getppid() != caller_pid:
            raise CallerGoneError
        if self._wakeup_fd in ready:
            os.read(self._wakeup_fd, 4096)
        for descriptor in gates.keys() & set(ready):
            gates[descriptor].collect()

    def _reap(self) -> None:
        for pid in list(self._rank_of):
            # Look first, reap later: while the dead leader is not reaped its group's number cannot be reused.
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            ended_at_s = time.monotonic()
            kill_group(pid)
            _, status = os.waitpid(pid, 0)
            self._record(self._rank_of.pop(pid), os.waitstatus_to_exitcode(status), ended_at_s)

    def _record(self, rank: int, exit_code: int, ended_at_s: float) -> None:
        self._statuses[rank] = RankStatus(
            rank=rank,
            exit_code=exit_code,
            started_at_s=self._started_at_s[rank],
            ended_at_s=ended_at_s,
            stopped=self._stopped.get(rank),
            was_held=rank in self._held,
        )
        failed = exit_code != 0 or rank not in self._finish.arrived
        if failed and self._first_failure_at_s is None:
            self._first_failure_at_s = ended_at_s

    def _stop_all(self, reason: StopReason) -> None:
        """Has the remaining ranks write their stacks, then kills them."""
        for pid, rank in self._rank_of.items():
            self._stopped[rank] = reason
            if is_stopped(pid):
                self._held.add(rank)
            os.kill(pid, STACKS_SIGNAL)
        stacks = [RankFiles(Path(self._job.folder), rank).stacks for rank in self._rank_of.values()]
        _wait_until_written(stacks)
        self._kill_all()

    def _kill_all(self) -> None:
        for pid in self._rank_of:
            kill_group(pid)
        limit_s = time.monotonic() + _REAP_WAIT_S
        while self._rank_of and time.monotonic() < limit_s:
            self._reap()
            time.sleep(0.001)

    def _end_all(self) -> None:
        """Leaves nothing behind: no rank, none of their descendants, no descriptor."""
        self._kill_all()
        limit_s = time.monotonic() + _REAP_WAIT_S
        # Killing one orphan can hand us its children, so look again until there are none.
        while (orphans := self._orphans()) and time.monotonic() < limit_s:
            for pid in orphans:
                kill_group(pid)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        for gate in (self._start, self._finish):
            gate.close()

    def _orphans(self) -> list[int]:
        kept = {self._store.pid, None if self._nursery is None else self._nursery.pid}
        return [pid for pid in children(os.getpid()) if pid not in kept]


def _wait_until_written(stacks: list[Path]) -> None:
    """Waits until all files have something and have stopped growing; a stopped process writes nothing."""
    limit_s = time.monotonic() + _STACKS_WAIT_S
    sizes: list[int] = []
    while time.monotonic() < limit_s:
        before, sizes = sizes, [path.stat().st_size if path.exists() else 0 for path in stacks]
        if all(sizes) and sizes == before:
            return
        time.sleep(0.02)
