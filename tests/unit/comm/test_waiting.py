"""A process that waits for another one takes all that it has been told before it sleeps."""

import os
import select
import socket

import pytest
import torch

from shardwright.comm.local_link import LocalLink, LocalReceipt
from shardwright.comm.local_peers import LocalPeers

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs anonymous files in memory")


@pytest.mark.parametrize("heard_at", [1, 2, 3])
def test_whenever_messages_are_heard_they_are_taken(heard_at):
    """A sender that tried again heard of messages, and slept with them in its hands. The other end had to get
    rid of one before it would read: both waited until the timeout.
    """
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here, there = LocalLink(first, 1), LocalLink(second, 0)
    peers = LocalPeers({1: here}, timeout_s=5.0)
    message = torch.ones(3)
    receipts = [peers.post(torch.zeros(3), 1) for _ in range(4)]
    while here.write(message):
        pass
    listen, num_listened = here.listen, 0

    def listen_to_more(*, once=False):
        nonlocal num_listened
        num_listened += 1
        if num_listened == heard_at:
            while there.write(message):
                pass
        listen(once=once)

    class Poll:
        def poll(self, _):
            if num_listened >= heard_at and not select.select([here.fd], [], [], 0)[0]:  # it would sleep
                assert all(receipt.arrived for receipt in receipts)
                there.post(LocalReceipt(torch.zeros(3)))
                there.deliver()
            return [(here.fd, select.POLLIN)]

    here.listen = listen_to_more
    peers._poll = Poll()
    try:
        peers.send(message, 1)
    finally:
        peers.close()
        there.close()
