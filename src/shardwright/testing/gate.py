"""A gate that ranks pass together."""

import os
from collections.abc import Iterable

__all__ = ["Gate"]


class Gate:
    """Holds ranks until all that still live have arrived.

    ::

        rank                          server
        (1) writes its number ------> collects numbers
        (2) reads, hence waits        (3) closes its end when the rest has arrived or died: all reads return
    """

    def __init__(self) -> None:
        self._arrivals_fd, self._arrivals_write_fd = os.pipe()
        self._release_read_fd, self._release_fd = os.pipe()
        self.arrived: set[int] = set()
        self.is_open = False

    @classmethod
    def of_rank(cls, arrivals_write_fd: int, release_read_fd: int) -> "Gate":
        """In a rank that was forked from elsewhere: the gate with these `rank_ends`."""
        gate = cls.__new__(cls)
        gate._arrivals_write_fd, gate._release_read_fd = arrivals_write_fd, release_read_fd
        return gate

    @property
    def rank_ends(self) -> tuple[int, int]:
        return self._arrivals_write_fd, self._release_read_fd

    @property
    def arrivals_fd(self) -> int:
        """Readable when a rank has arrived."""
        return self._arrivals_fd

    def keep_server_ends(self) -> None:
        """In the server, once all ranks are forked."""
        os.close(self._arrivals_write_fd)
        os.close(self._release_read_fd)

    def keep_rank_ends(self) -> None:
        """In a rank, first of all: a rank that held the server's end could never be released."""
        os.close(self._arrivals_fd)
        os.close(self._release_fd)

    def cross(self, rank: int) -> None:
        """In a rank: arrives and waits for the others."""
        os.write(self._arrivals_write_fd, bytes([rank]))  # (1)
        os.read(self._release_read_fd, 1)  # (2)

    def collect(self) -> None:
        """In the server: notes who has arrived; to be called when `arrivals_fd` is readable."""
        self.arrived.update(os.read(self._arrivals_fd, 4096))

    def open_if_complete(self, *, num_ranks: int, ended: Iterable[int]) -> None:
        """In the server: lets all pass once nobody else can come."""
        if not self.is_open and len(self.arrived.union(ended)) == num_ranks:
            os.close(self._release_fd)  # (3)
            self.is_open = True

    def close(self) -> None:
        """In the server: frees the rest."""
        os.close(self._arrivals_fd)
        if not self.is_open:
            os.close(self._release_fd)
            self.is_open = True
