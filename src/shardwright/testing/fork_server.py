"""The fork server: imports PyTorch once, then forks the ranks of every job from itself.

::

    caller ──socket──> fork server ──fork──> rank 0, rank 3, ...     each leads a process group
                            ├──Popen─> nursery ──fork──> rank 1, ... with another hash seed: `nursery.py`
                            └──fork──> store process                 TCPStore for one job after another

It must never start a thread: a fork copies only the calling thread, and a lock held by another thread stays
locked in the child for ever. So the server imports, but computes nothing, and the store has its own process,
which a dying rank does not take with it. Every job gets an empty store; ranks use it only if their function
makes its process group itself.

It ends when the caller's end of the socket closes or the caller is gone, and kills the ranks, their children
and the store. If the server itself is killed, the kernel kills store and ranks (``PR_SET_PDEATHSIG``).
"""

import argparse
import contextlib
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from shardwright.flight_record import state_of
from shardwright.launch.processes import adopt_orphans, children, die_with_parent, kill_group
from shardwright.testing.job import Job, RankFiles, RankStatus, StopReason, receive, send
from shardwright.testing.nursery import (
    Nursery,
    belongs_to_nursery,
    import_always,
    import_once,
    require_one_thread,
)
from shardwright.testing.rank import STACKS_SIGNAL, Gate, run_rank


class _StoreProcess:
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


class _CallerGoneError(Exception):
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
        store: _StoreProcess,
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
            raise _CallerGoneError
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
            if state_of(pid) in ("T", "t"):
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


_POLL_S = 1.0


class _ForkServer:
    """The server's state between jobs."""

    def __init__(self, channel: socket.socket, *, caller_pid: int, nursery: Nursery | None) -> None:
        self._channel = channel
        self._nursery = nursery
        self._caller_pid = caller_pid
        self._wakeup, write_end = os.pipe()
        for descriptor in (self._wakeup, write_end):
            os.set_blocking(descriptor, False)
        # A byte arrives in the pipe whenever a child ends, so that select() returns at once.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        self._store = _StoreProcess(os.getpid())

    def serve(self) -> None:
        """Runs one job after another until the caller goes away."""
        try:
            while self._wait_for_job():
                send(self._channel, self._answer(receive(self._channel)))
        except (EOFError, _CallerGoneError, BrokenPipeError):
            return
        finally:
            self._store.close()
            if self._nursery is not None:
                self._nursery.close()

    def _wait_for_job(self) -> bool:
        while not select.select([self._channel], [], [], _POLL_S)[0]:
            # The socket alone does not tell: a forked child of the caller may hold a copy of its end.
            if os.getppid() != self._caller_pid:
                return False
        return True

    def _answer(self, job: Job) -> list[RankStatus] | str:
        """Runs a job; a text is the traceback of the server's own failure."""
        sys.path[:] = job.search_path
        try:
            self._import(job)
            run = Run(
                job,
                store=self._store,
                channel=self._channel,
                wakeup_fd=self._wakeup,
                nursery=self._nursery,
            )
            return run.statuses(caller_pid=self._caller_pid)
        except _CallerGoneError:
            shutil.rmtree(job.folder, ignore_errors=True)  # nobody else will
            raise
        except Exception:
            return traceback.format_exc()

    def _import(self, job: Job) -> None:
        """Imports what a job asks for, here and in the nursery at the same time."""
        nursery = self._nursery
        waits = nursery is not None and nursery.begin_to_import(job.preload, job.search_path)
        try:
            import_once(job.preload)
            require_one_thread(job.preload)
        finally:
            if waits:
                assert nursery is not None
                nursery.await_imports()


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves the caller on an inherited socket; started by `shardwright.testing.client`."""
    parser = argparse.ArgumentParser(prog="python -m shardwright.testing.fork_server")
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.add_argument("--caller-pid", type=int, required=True)
    parser.add_argument("--hash-seed", type=int, required=True, help="of the nursery")
    options = parser.parse_args(arguments)
    channel = socket.socket(fileno=options.channel_fd)
    channel.set_inheritable(False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    adopt_orphans()
    # Elsewhere orphans are not adopted, and a nursery's ranks would be nobody's.
    nursery = Nursery(options.hash_seed) if sys.platform == "linux" else None
    import_always()
    _ForkServer(channel, caller_pid=options.caller_pid, nursery=nursery).serve()


if __name__ == "__main__":
    main()
