"""Messages between pipeline ranks."""

import pytest
import torch
import torch.distributed as dist

from shardwright.comm import local_peers
from shardwright.comm.local_peers import connect_local_peers
from shardwright.comm.transport import Transport
from shardwright.testing import run_ranks

CPU = torch.device("cpu")


def talk(num_groups, shared_memory):
    """Every rank posts all its receives, then sends to all others, up and down."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(size))) for _ in range(num_groups)]
    up, down = groups or (None, None)
    local = connect_local_peers(timeout_s=10.0) if shared_memory else None
    assert (local is not None) == shared_memory
    transport = Transport(range(size), rank=rank, up=up, down=down, local=local)
    others = [other for other in range(size) if other != rank]
    receipts = {
        (other, number): transport.post_receive((number, 2), other, dtype=torch.float64, device=CPU)
        for other in others
        for number in range(3)
    }
    for other in others:
        for number in range(3):
            transport.send(torch.full((number, 2), 10.0 * rank + number, dtype=torch.float64), other)
    received = {key: receipt.wait().tolist() for key, receipt in receipts.items()}
    transport.flush()
    return received


def check(found):
    for rank, received in enumerate(found):
        others = [other for other in range(len(found)) if other != rank]
        assert received == {
            (other, number): [[10.0 * other + number] * 2] * number for other in others for number in range(3)
        }


@pytest.mark.parametrize("shared_memory", [False, True])
def test_receives_may_be_posted_before_anything_is_sent(shared_memory):
    check(run_ranks(talk, 3, 0, shared_memory))


def test_each_direction_may_have_a_group_of_its_own():
    check(run_ranks(talk, 3, 2, False))


def hold(num_bytes, num_messages):
    """The most messages that the sender held."""
    transport = Transport([0, 1], rank=dist.get_rank())
    numbers = range(num_messages)
    if dist.get_rank() == 1:
        receipts = [transport.post_receive((num_bytes,), 0, dtype=torch.uint8, device=CPU) for _ in numbers]
        return [int(receipt.wait()[-1]) for receipt in receipts]
    most = 0
    for number in numbers:
        transport.send(torch.full((num_bytes,), number, dtype=torch.uint8), 1)
        most = max(most, len(transport._pending))
    transport.flush()
    return most


def test_messages_that_have_left_are_let_go():
    assert run_ranks(hold, 2, 2**20, 20) == [4, [*range(20)]]


@pytest.mark.parametrize("shared_memory", [False, True])
def test_tensors_of_every_kind_arrive(shared_memory):
    """Over gloo, conjugates failed, and numbers that are negated when they are read had the wrong sign."""

    def talk_of_kinds():
        rank = dist.get_rank()
        local = connect_local_peers(timeout_s=10.0) if shared_memory else None
        transport = Transport([0, 1], rank=rank, local=local)
        z = torch.tensor([1 + 2j, 3 - 1j])
        kinds = [
            z,
            z.conj(),
            z.conj()[0].imag,
            z.conj()[:1].imag,
            torch.ones(2, 3)[:1, :1].t(),
            torch.ones(3, 3)[:1, 0],
            torch.tensor(True),
            torch.tensor([True, False]),
            torch.ones(2, 3).t(),
            torch.ones(1).expand(4),
            torch.arange(3, dtype=torch.int16),
            torch.arange(4.0).to(torch.float8_e4m3fn),
            torch.zeros(0, 2),
        ]
        for kind in kinds:
            if rank == 0:
                transport.send(kind, 1)
            else:
                found = transport.post_receive(kind.shape, 0, dtype=kind.dtype, device=CPU).wait()
                assert found.tolist() == kind.tolist()
        transport.flush()

    run_ranks(talk_of_kinds, 2)


def test_ranks_on_two_hosts_do_not_wait_in_a_circle():
    """Ranks 0 and 2 share a host. While rank 0 waited for rank 1, through gloo, it did not take what rank 2
    sent through shared memory; so rank 2 did not get on to what rank 1 waited for.
    """

    def wait_for_the_other_host():
        rank = dist.get_rank()
        local_peers._host = lambda: "second" if rank == 1 else "first"
        transport = Transport(range(3), rank=rank, local=connect_local_peers(timeout_s=5.0))

        def post(source):
            return transport.post_receive((2,), source, dtype=torch.float32, device=CPU)

        if rank == 0:
            receipts = [*(post(2) for _ in range(6)), post(1)]
            return sum(receipt.wait().sum().item() for receipt in reversed(receipts))
        if rank == 1:
            transport.send(2 * post(2).wait(), 0)
        else:
            for target in (0, 0, 0, 0, 0, 0, 1):
                transport.send(torch.ones(2), target)
        transport.flush()
        return None

    assert run_ranks(wait_for_the_other_host, 3, timeout_s=30) == [16.0, None, None]
