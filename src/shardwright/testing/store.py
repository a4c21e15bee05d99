"""The process that serves the jobs' key-value stores.

It is a process of its own so that a dying rank takes no store with it, and so that the fork server stays
without threads. Every job gets an empty store, so it never sees another job's keys. Ranks use it only if
their function makes its process group itself.
"""

import contextlib
import os
import signal
import socket
from typing import NoReturn

from shardwright.launch.processes import die_with_parent

__all__ = ["StoreProcess"]


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
        """Ends the process."""
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
