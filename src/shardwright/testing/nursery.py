"""A second interpreter with another hash seed, the source of every other rank of the fork server.

A set of names is ordered differently in each interpreter, and Python takes the seed of that order at its
start. Ranks forked from one server would all have the same order, so that no test could see a mistake that
depends on it. The ranks are still children of the fork server, which adopts orphans, and they begin with its
random generators::

    fork server ──Popen──> nursery ──fork──> a process that ends at once ──fork──> rank 1, rank 2, ...
         └──────────────────────────────── adopts them ────────────────────────────────┘
"""

import argparse
import contextlib
import gc
import importlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from shardwright.after_import import objects_are_frozen
from shardwright.launch.processes import die_with_parent, num_threads
from shardwright.testing.job import Job, receive, send
from shardwright.testing.rank import Gate, run_rank

# What a rank would otherwise import by itself, at 0.1 to 1 s each: creating an optimizer imports
# torch._dynamo.
_ALWAYS = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.nn.functional",
    "torch.distributed.tensor.parallel",
    "torch.utils.checkpoint",
)
_IF_THEY_IMPORT = (
    "shardwright.comm.collectives.shardwright_process_group",
    "shardwright.torch.checkpoints.checkpoints",
    "shardwright.torch.measuring.planning",
    "shardwright.torch.optimizer.distributed_optimizer",
    "shardwright.torch.startup",
    "shardwright.torch.step_function",
    "shardwright.torch.tensor_parallel.deciding",
    "torch.profiler._cupti_monitor",
)


def import_always() -> None:
    """Imports what every rank needs."""
    import_once(_ALWAYS)
    for name in _IF_THEY_IMPORT:
        # Only a head start: what cannot be imported here raises in the rank that needs it, with its
        # traceback.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    require_one_thread(())


def import_once(modules: Sequence[str]) -> None:
    new = [name for name in modules if name not in sys.modules]
    for name in new:
        importlib.import_module(name)
    if new:
        gc.collect()
        # Otherwise each rank's first collection would touch, and so copy, every page of these modules.
        gc.freeze()
        objects_are_frozen()  # counted here, and not by each rank


def require_one_thread(imported: Sequence[str]) -> None:
    """Refuses to go on where a module has started a thread."""
    if num_threads() > 1:
        raise RuntimeError(
            f"importing {', '.join(imported) or 'torch'} started threads ({num_threads()} run now), and a "
            "process with threads cannot be forked safely. Import the module inside the function instead of "
            "preloading it."
        )


_ENDS_OF_GATES = 4
_WITH_GATES = b"g"


def hash_seeds(first: int) -> tuple[int, int]:
    """The seeds of the fork server and of its nursery, as ``PYTHONHASHSEED`` has them."""
    return first, (first + 1) % 2**32


def belongs_to_nursery(rank: int) -> bool:
    """Whether a rank has the other seed: neighbours on any axis of a mesh of 2 x 2 x ... have not the same.

    >>> [belongs_to_nursery(rank) for rank in range(8)]
    [False, True, True, False, True, False, False, True]
    """
    return rank.bit_count() % 2 == 1


class Nursery:
    """The fork server's side of it."""

    def __init__(self, hash_seed: int) -> None:
        self._channel, theirs = socket.socketpair()
        self._prepared: set[str] = set()
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "shardwright.testing.nursery"),
                    *("--channel-fd", str(theirs.fileno())),
                    *("--server-pid", str(os.getpid())),
                ],
                env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def begin_to_import(self, modules: Sequence[str], search_path: Sequence[str]) -> bool:
        """Has it import what it has not yet; whether there is any, so that `await_imports` must follow."""
        new = [name for name in modules if name not in self._prepared]
        if new or not self._prepared:
            send(self._channel, (new, list(search_path)))
            self._prepared.update(["", *new])
            return True
        return False

    def await_imports(self) -> None:
        problem: str | None = receive(self._channel)
        if problem is not None:
            self._prepared.clear()
            raise RuntimeError(f"in the process that forks every other rank:\n{problem}")

    def fork(self, job: Job, ranks: Sequence[int], gates: tuple[Gate, Gate]) -> dict[int, int]:
        """Forks ranks of a job; they are children of the calling process; returns their process ids."""
        send(self._channel, (job, (list(ranks), _generators())))
        ends = [end for gate in gates for end in gate.rank_ends]
        socket.send_fds(self._channel, [_WITH_GATES], ends)
        pids: dict[int, int] = receive(self._channel)
        return pids

    def forget(self) -> None:
        """Closes the channel in a forked rank, which must not hold it."""
        self._channel.close()

    def close(self) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()


def _generators() -> list[Any]:
    """The state of PyTorch's and NumPy's generators; Python seeds its own anew in every fork."""
    import numpy as np
    import torch  # the server has imported both already

    kind, keys, *rest = np.random.get_state()
    return [bytes(torch.get_rng_state().numpy()), str(kind), np.asarray(keys).tobytes(), *rest]


def _set_generators(states: list[Any]) -> None:
    import numpy as np
    import torch

    of_torch, kind, keys, *rest = states
    torch.set_rng_state(torch.frombuffer(bytearray(of_torch), dtype=torch.uint8))
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))


def _serve(channel: socket.socket, *, server_pid: int) -> None:
    """Imports and forks as it is told to, until the server goes away."""
    while True:
        try:
            what, how = receive(channel)
        except EOFError:
            return
        if isinstance(what, Job):
            ranks, generators = how
            _set_generators(generators)  # forked ranks begin with those of the server, all of them
            send(channel, _fork(channel, what, ranks, server_pid=server_pid))
        else:
            send(channel, _import(what, how))


def _import(modules: Sequence[str], search_path: Sequence[str]) -> str | None:
    sys.path[:] = search_path
    try:
        import_once(modules)
        require_one_thread(modules)
    except Exception:
        return traceback.format_exc()
    return None


def _fork(channel: socket.socket, job: Job, ranks: Sequence[int], *, server_pid: int) -> dict[int, int]:
    """Forks ranks through a process that ends at once, and so makes them the server's children."""
    _, ends, _, _ = socket.recv_fds(channel, len(_WITH_GATES), _ENDS_OF_GATES)
    for end in ends:
        os.set_inheritable(end, False)
    read_end, write_end = os.pipe()
    between = os.fork()
    if between == 0:
        os.close(read_end)
        channel.close()
        _fork_each(job, ranks, ends, write_end, server_pid=server_pid)
    os.close(write_end)
    for end in ends:
        os.close(end)
    with os.fdopen(read_end, "rb") as told:
        pids = [int(word) for word in told.read().split()]
    os.waitpid(between, 0)  # its children are the server's from now on
    return dict(zip(ranks, pids, strict=True))


def _fork_each(
    job: Job, ranks: Sequence[int], ends: Sequence[int], write_end: int, *, server_pid: int
) -> NoReturn:
    try:
        for rank in ranks:
            pid = os.fork()
            if pid == 0:
                os.close(write_end)
                _become(job, rank, ends, server_pid=server_pid)
            os.write(write_end, f"{pid} ".encode())
    finally:
        os._exit(0)


def _become(job: Job, rank: int, ends: Sequence[int], *, server_pid: int) -> NoReturn:
    try:
        os.setpgid(0, 0)
        between = os.getppid()
        while os.getppid() == between != server_pid:  # until it has ended, and the server has adopted us
            time.sleep(0.0005)
        start, finish = Gate.of_rank(*ends[:2]), Gate.of_rank(*ends[2:])
        run_rank(job, rank, server_pid=server_pid, start=start, finish=finish)
    finally:
        os._exit(1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves the fork server on an inherited socket."""
    parser = argparse.ArgumentParser(prog="python -m shardwright.testing.nursery")
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.add_argument("--server-pid", type=int, required=True)
    options = parser.parse_args(arguments)
    channel = socket.socket(fileno=options.channel_fd)
    channel.set_inheritable(False)
    die_with_parent(options.server_pid)
    import_always()
    _serve(channel, server_pid=options.server_pid)


if __name__ == "__main__":
    main()
