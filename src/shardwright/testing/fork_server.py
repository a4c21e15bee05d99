"""The fork server: imports PyTorch once, then forks the ranks of every job from itself.

::

    caller ──socket──> fork server ──fork──> rank 0, rank 3, ...     each leads a process group
                            ├──Popen─> nursery ──fork──> rank 1, ... with another hash seed: `nursery.py`
                            └──fork──> store process                 TCPStore for one job after another

It must never start a thread: a fork copies only the calling thread, and a lock held by another thread stays
locked in the child for ever. So the server imports, but computes nothing, and the store has its own process.

It ends when the caller's end of the socket closes or the caller is gone, and kills the ranks, their children
and the store. If the server itself is killed, the kernel kills store and ranks (``PR_SET_PDEATHSIG``).
"""

import argparse
import os
import select
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Sequence

from shardwright.launch.processes import adopt_orphans
from shardwright.testing.job import Job, RankStatus, receive, send
from shardwright.testing.nursery import Nursery, import_always, import_once, require_one_thread
from shardwright.testing.run import CallerGoneError, Run, StoreProcess

_POLL_S = 1.0


class ForkServer:
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
        self._store = StoreProcess(os.getpid())

    def serve(self) -> None:
        """Runs one job after another until the caller goes away."""
        try:
            while self._wait_for_job():
                send(self._channel, self._answer(receive(self._channel)))
        except (EOFError, CallerGoneError, BrokenPipeError):
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
        except CallerGoneError:
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
    ForkServer(channel, caller_pid=options.caller_pid, nursery=nursery).serve()


if __name__ == "__main__":
    main()
