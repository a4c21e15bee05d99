"""Both ends of a link, in one process."""

import gc
import os
import socket
from contextlib import contextmanager

import pytest
import torch

from shardwright.comm.local_link import LocalLink, LocalReceipt
from shardwright.comm.meeting_place import MeetingPlace, message_of
from shardwright.comm.message_names import Purpose
from shardwright.errors import TraceMismatchError

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs anonymous files in memory")


@contextmanager
def ends():
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    links = LocalLink(first, 1), LocalLink(second, 0)
    try:
        yield links
    finally:
        for link in links:
            link.close()


def receive(link, like):
    receipt = LocalReceipt(torch.zeros_like(like))
    link.post(receipt)
    link.listen()
    link.deliver()
    assert receipt.arrived
    return receipt.tensor


def num_fds():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_what_was_said_last_is_heard_though_the_answer_fails():
    """Where a peer had ended before it could be told that its message was read, what it had sent after that
    message was lost.
    """
    with ends() as (sender, receiver):
        receipts = [LocalReceipt(torch.zeros(3)) for _ in range(2)]
        for receipt in receipts:
            receiver.post(receipt)
        assert sender.write(torch.ones(3))
        receiver.listen()
        assert sender.write(torch.full((3,), 2.0))
        sender.close()
        receiver.deliver()
        assert not receiver.ended
        receiver.listen()
        assert receiver.ended
        receiver.deliver()
        assert [receipt.tensor.tolist() for receipt in receipts] == [[1.0] * 3, [2.0] * 3]


def test_memory_and_descriptors_are_let_go():
    before = num_fds()
    with ends() as (sender, receiver):
        for size in range(1, 2000, 100):
            message = torch.ones(size)
            assert sender.write(message)
            receive(receiver, message)
        assert num_fds() <= before + 4  # a socket and a segment at either end
        sender.shrink()
        assert sender.num_bytes == 0
        assert sender.write(torch.ones(2))
        assert receive(receiver, torch.ones(2)).tolist() == [1, 1]
        assert sender.num_bytes == 64
    assert num_fds() == before  # with the ends still there


def test_a_lack_of_memory_is_named():
    """What came was "[Errno 27] File too large" alone."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ends() as (sender, _):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
        try:
            with pytest.raises(OSError, match=r"8.0 MiB .* rank 1: File too large.* shared_memory: false"):
                sender.write(torch.ones(2**21))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_lack_of_descriptors_is_named():
    resource = pytest.importorskip("resource")
    with ends() as (sender, receiver):
        assert sender.write(torch.ones(3))
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            with pytest.raises(OSError, match="ulimit -n"):
                receiver.listen()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_message_of_the_same_size_for_another_purpose_is_refused():
    with ends() as (sender, receiver):
        receiver.post(LocalReceipt(torch.zeros(3), Purpose.BATCH))
        assert sender.write(torch.ones(3), Purpose.NORM)
        receiver.listen()
        with pytest.raises(
            TraceMismatchError,
            match=r"rank 0 sent a norm of gradients \(12 bytes\) where this rank takes the batch of a step",
        ):
            receiver.deliver()


def test_a_call_to_which_the_other_rank_does_not_come_is_named():
    place = MeetingPlace("optimizer.state_dict()", ranks=(0, 1), number=4, meeting=3)
    with ends() as (sender, receiver):
        receiver.post(LocalReceipt(torch.zeros(8, dtype=torch.uint8), Purpose.BATCH))
        assert sender.write(message_of(place), Purpose.MEETING)
        receiver.listen()
        with pytest.raises(
            TraceMismatchError,
            match=r"rank 0 calls optimizer\.state_dict\(\), and this rank does not: it takes the batch",
        ):
            receiver.deliver()
