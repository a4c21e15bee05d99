"""The other ranks of this host, and how this process waits for them."""

import math
import select
import time
from collections.abc import Callable, Mapping

import torch.distributed as dist
from torch import Tensor

from shardwright.comm.identity.after_fork import close_in_children
from shardwright.comm.identity.purpose import Purpose
from shardwright.comm.joining.process_group import tell_all
from shardwright.comm.one_host.local_link import LocalLink, LocalReceipt
from shardwright.comm.one_host.local_sockets import connect_on_this_host
from shardwright.errors import PeerLostError, PeerTimeoutError

__all__ = ["LocalPeers", "connect_local_peers"]

_LONGEST_POLL_S = 3600.0  # the kernel takes no more than some weeks
_PAUSE_S = 1.0  # between two questions whether a rank has stopped; the first wait is as long


class LocalPeers:
    """Ways to the other ranks of this host.

    While this process waits for one of them, it takes what all of them send: nobody waits in a circle as long
    as receives are posted before those that wait.
    """

    def __init__(
        self,
        links: Mapping[int, LocalLink],
        *,
        timeout_s: float,
        has_stopped: Callable[[int], bool] = lambda _: False,
    ):
        self._links = dict(links)
        self._timeout_s = timeout_s
        self._has_stopped = has_stopped
        self._poll = select.poll()
        self._by_fd = {link.fd: link for link in links.values()}
        for fd in self._by_fd:
            self._poll.register(fd, select.POLLIN)
        close_in_children(self)

    def __contains__(self, rank: int) -> bool:
        return rank in self._links

    @property
    def num_bytes(self) -> int:
        """Shared memory for the messages that this rank sends."""
        return sum(link.num_bytes for link in self._links.values())

    def send(self, tensor: Tensor, target: int, purpose: Purpose = Purpose.PIPELINE) -> None:
        """Copies a tensor for a rank; waits where several of its messages are unread."""
        link = self._links[target]
        if not link.write(tensor, purpose):
            self._until(lambda: not link.is_full, link, "sending to")
            link.write(tensor, purpose)

    def post(self, tensor: Tensor, source: int, purpose: Purpose = Purpose.PIPELINE) -> LocalReceipt:
        """Names the tensor into which the next message of a rank goes."""
        receipt = LocalReceipt(tensor, purpose)
        self._links[source].post(receipt)
        return receipt

    def wait(
        self, receipt: LocalReceipt, source: int, *, look: Callable[[], float] = lambda: math.inf
    ) -> None:
        """Returns when the message is there."""
        self._until(lambda: receipt.arrived, self._links[source], "receiving from", look)

    def has_ended(self, rank: int) -> bool:
        """Whether a rank has closed its connection, as far as is known now."""
        self._listen(0.0)
        return self._links[rank].ended

    def shrink(self) -> None:
        """Releases the memory for future messages, after some that were larger than usual."""
        for link in self._links.values():
            link.shrink()

    def close(self) -> None:
        """Releases all connections, and the memory."""
        for link in self._links.values():
            link.close()

    def _until(
        self,
        done: Callable[[], bool],
        link: LocalLink,
        doing: str,
        look: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """Waits; `done` must not listen: what is heard has to be delivered before this process sleeps."""
        now_s = time.monotonic()
        deadline_s, asks_s = now_s + self._timeout_s, now_s + _PAUSE_S
        while True:
            for each in self._links.values():
                each.deliver()
            if done():
                return
            if link.ended:
                raise PeerLostError(f"{doing} rank {link.peer} failed: it has ended", rank=link.peer)
            now_s = time.monotonic()
            if now_s >= asks_s:
                if self._has_stopped(link.peer):
                    raise PeerLostError(
                        f"{doing} rank {link.peer} failed: it takes no further step", rank=link.peer
                    )
                asks_s = time.monotonic() + _PAUSE_S
            left_s = deadline_s - now_s
            if left_s <= 0:
                raise PeerTimeoutError(
                    f"{doing} rank {link.peer} failed: no answer within {self._timeout_s:g} s. It hangs, or "
                    "is at another place of the script; its log may tell. If it may take longer, raise the "
                    "setting timeout_s.",
                    rank=link.peer,
                )
            self._listen(min(left_s, max(asks_s - now_s, 0.0), look()))

    def _listen(self, timeout_s: float) -> None:
        """Records what is said; waits for the first word."""
        for fd, _ in self._poll.poll(min(timeout_s, _LONGEST_POLL_S) * 1000):
            link = self._by_fd[fd]
            link.listen()
            if link.ended:
                self._poll.unregister(fd)


def connect_local_peers(
    *, timeout_s: float, has_stopped: Callable[[int], bool] = lambda _: False
) -> LocalPeers | None:
    """Connects the ranks of each host; collective over all ranks of the default process group."""
    sockets = connect_on_this_host(dist.get_rank(), tell_all, what="messages", timeout_s=timeout_s)
    if not sockets:
        return None
    links = {other: LocalLink(connection, other) for other, connection in sockets.items()}
    return LocalPeers(links, timeout_s=timeout_s, has_stopped=has_stopped)
