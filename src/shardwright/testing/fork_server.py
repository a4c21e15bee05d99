"""The fork server: imports PyTorch once, then forks the ranks of every job from itself.

::

    caller ──socket──> fork server ──fork──> rank 0, rank 1, ...     each leads a process group
                            └──fork──> store process                 TCPStore for one job after another

It must never start a thread: a fork copies only the thread that calls it, and a lock held by another
thread stays locked in the child for ever. So the server imports, but computes nothing, and the store
has its own process.

It ends when the caller's end of the socket closes or the caller is gone, and takes the ranks, their
children and the store with it. If the server itself is killed, the kernel kills store and ranks
(``PR_SET_PDEATHSIG``).
"""

import argparse
import contextlib
import gc
import importlib
import importlib.util
import os
import select
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Sequence

from shardwright.launch.processes import adopt_orphans, num_threads
from shardwright.testing.job import Job, RankStatus, receive, send
from shardwright.testing.run import CallerGoneError, Run
from shardwright.testing.store import StoreProcess

__all__ = ["main"]

# What a rank would otherwise import by itself, at 0.1 to 1 s each: creating an optimizer imports
# torch._dynamo.
_ALWAYS_PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.nn.functional",
    "torch.distributed.tensor.parallel",
    "torch.utils.checkpoint",
)
_PRELOADED_IF_THEY_IMPORT = ("shardwright.torch", "torch.profiler._cupti_monitor")
_POLL_S = 1.0


class ForkServer:
    """The server's state between jobs.

    Args:
        channel: the socket to the caller.
        caller_pid: the process that started the server.
    """

    def __init__(self, channel: socket.socket, *, caller_pid: int) -> None:
        self._channel = channel
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
            _import(job.preload)
            _require_one_thread(job.preload)
            run = Run(job, store=self._store, channel=self._channel, wakeup_fd=self._wakeup)
            return run.statuses(caller_pid=self._caller_pid)
        except CallerGoneError:
            shutil.rmtree(job.folder, ignore_errors=True)  # nobody else will
            raise
        except Exception:
            return traceback.format_exc()


def _import(modules: Sequence[str]) -> None:
    new = [name for name in modules if name not in sys.modules]
    for name in new:
        importlib.import_module(name)
    if new:
        gc.collect()
        # Otherwise each rank's first collection would touch, and so copy, every page of these modules.
        gc.freeze()


def _require_one_thread(preload: Sequence[str]) -> None:
    if num_threads() > 1:
        raise RuntimeError(
            f"importing {', '.join(preload) or 'torch'} started threads ({num_threads()} run now), and a "
            "process with threads cannot be forked safely. Import the module inside the function instead of "
            "preloading it."
        )


def _import_own_modules() -> None:
    for name in _PRELOADED_IF_THEY_IMPORT:
        # Only a head start: what cannot be imported here raises in the rank that needs it, with its
        # traceback.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves the caller on an inherited socket; started by `shardwright.testing.client`."""
    parser = argparse.ArgumentParser(prog="python -m shardwright.testing.fork_server")
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.add_argument("--caller-pid", type=int, required=True)
    options = parser.parse_args(arguments)
    channel = socket.socket(fileno=options.channel_fd)
    channel.set_inheritable(False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    adopt_orphans()
    _import(_ALWAYS_PRELOADED)
    _import_own_modules()
    _require_one_thread(())
    ForkServer(channel, caller_pid=options.caller_pid).serve()


if __name__ == "__main__":
    main()
