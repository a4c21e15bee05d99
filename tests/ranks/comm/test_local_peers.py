"""Ranks of one host talk through shared memory."""

import gc
import logging
import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright.torch as sw
from shardwright.comm.local_peers import LocalPeers, connect_local_peers
from shardwright.comm.message_names import Purpose
from shardwright.comm.transport import SmallCollectives
from shardwright.comm.whereabouts import needed_by
from shardwright.errors import PeerLostError
from shardwright.run.context import context
from shardwright.testing import run_ranks, run_ranks_outcomes

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs anonymous files in memory")


def connect(timeout_s=30.0):
    peers = connect_local_peers(timeout_s=timeout_s)
    assert isinstance(peers, LocalPeers)
    return peers


def messages(source, target, count):
    """The same on both ends: tensors of all kinds."""
    choose = random.Random(100 * source + target)
    generator = torch.Generator().manual_seed(100 * source + target)
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.int64]
    for _ in range(count):
        shape = [choose.choice([1, 2, 5, 40]) for _ in range(choose.randrange(4))]
        tensor = torch.randint(-9, 9, shape, generator=generator).to(choose.choice(dtypes))
        yield tensor.t() if tensor.dim() == 2 else tensor[..., ::2] if tensor.dim() == 3 else tensor


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_messages_in_all_directions_arrive_in_order(num_ranks):
    count = 60

    def talk():
        rank, peers = dist.get_rank(), connect()
        others = [other for other in range(num_ranks) if other != rank]
        assert [other for other in range(num_ranks) if other in peers] == others
        expected = {other: list(messages(other, rank, count)) for other in others}
        receipts = {
            other: [peers.post(torch.empty_like(m), other) for m in expected[other]] for other in others
        }
        sent = {other: messages(rank, other, count) for other in others}
        order = random.Random(rank).sample(others * count, len(others) * count)
        for other in order:
            peers.send(next(sent[other]), other)
        for other in others:
            for receipt, message in zip(receipts[other], expected[other], strict=True):
                peers.wait(receipt, other)
                assert receipt.tensor.equal(message)
        assert 0 < peers.num_bytes < 2**20
        peers.close()

    run_ranks(talk, num_ranks)


def test_a_killed_rank_is_noticed_at_once():
    def wait_for_the_last():
        rank, peers = dist.get_rank(), connect()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        receipt = peers.post(torch.empty(3), 1)
        with pytest.raises(PeerLostError, match="receiving from rank 1 failed: it has ended") as caught:
            peers.wait(receipt, 1)
        with pytest.raises(PeerLostError, match="sending to rank 1 failed"):
            peers.send(torch.ones(3), 1)
        return caught.value.rank

    outcomes = run_ranks_outcomes(wait_for_the_last, 3, timeout_s=15)
    assert [outcome.exit_code for outcome in outcomes] == [0, -signal.SIGKILL, 0]
    assert [outcome.value for outcome in outcomes if outcome.ok] == [1, 1]


def test_all_that_a_rank_sent_before_it_ended_arrives():
    def last_words():
        rank, peers = dist.get_rank(), connect()
        if rank == 0:
            for number in range(4):
                peers.send(torch.full((1000,), float(number)), 1)
            os._exit(0)
        while not peers._links[0].ended:
            peers._links[0].listen()
        receipts = [peers.post(torch.empty(1000), 0) for _ in range(4)]
        for receipt in receipts:
            peers.wait(receipt, 0)
        return [int(receipt.tensor[-1]) for receipt in receipts]

    outcomes = run_ranks_outcomes(last_words, 2, timeout_s=15)
    assert outcomes[1].value == [0, 1, 2, 3]


def test_a_peer_that_does_not_answer_is_named():
    def wait_in_vain():
        peers = connect(timeout_s=0.05)
        if dist.get_rank() == 0:
            with pytest.raises(PeerLostError, match=r"receiving from rank 1 failed: no answer within 0.05 s"):
                peers.wait(peers.post(torch.empty(3), 1), 1)
            for _ in range(4):
                peers.send(torch.ones(3), 1)
            with pytest.raises(PeerLostError, match=r"sending to rank 1 failed: .* raise the setting"):
                peers.send(torch.ones(3), 1)
        dist.barrier()

    run_ranks(wait_in_vain, 2)


def test_a_child_does_not_keep_its_parents_connections_open():
    """Others would not notice that the parent has ended."""

    def leave_a_child():
        rank, peers = dist.get_rank(), connect()
        if rank == 0:
            if os.fork() == 0:
                time.sleep(20)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLostError, match="it has ended"):
            peers.wait(peers.post(torch.empty(3), 0), 0)

    assert run_ranks_outcomes(leave_a_child, 2, timeout_s=15)[1].ok


@pytest.mark.parametrize("lacking", [0, 2])
def test_without_shared_memory_all_ranks_of_the_host_fall_back(lacking):
    """The others waited for a call of that rank until the timeout."""

    def connect_without():
        rank, warned = dist.get_rank(), []
        handler = logging.Handler()
        handler.emit = lambda record: warned.append(record.getMessage())
        logging.getLogger("shardwright.comm.local_peers").addHandler(handler)
        if rank == lacking:

            def refuse(*_):
                raise OSError(28, "No space left on device")

            os.memfd_create = refuse
        return connect_local_peers(timeout_s=40.0), warned

    found = run_ranks(connect_without, 3, timeout_s=20)
    assert [peers for peers, _ in found] == [None] * 3
    assert [text for _, warned in found for text in warned] == [
        f"messages on this host go through sockets, because of rank {lacking}: "
        "OSError: [Errno 28] No space left on device"
    ]


@pytest.mark.parametrize("shared_memory", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_small_collectives(num_ranks, shared_memory):
    def collect():
        rank = dist.get_rank()
        local = connect_local_peers(timeout_s=30.0) if shared_memory else None
        assert (local is not None) == (shared_memory and num_ranks > 1)
        everyone = SmallCollectives(range(num_ranks), rank=rank, local=local)
        told = []
        for source in range(num_ranks):
            for shape in [(), (3,), (0,), (2, 500)]:
                tensor = torch.full(shape, float(rank))
                everyone.broadcast([tensor], source, Purpose.BATCH)
                assert tensor.equal(torch.full(shape, float(source)))
        large = torch.arange(10**6, dtype=torch.int32)  # more than a piece
        received = large.clone() if rank == 0 else torch.zeros_like(large)
        everyone.broadcast([received], 0, Purpose.BATCH)
        assert received.equal(large)
        assert local is None or local.num_bytes < 5 * 2**18 * num_ranks
        for number in range(9):  # more than may be unread
            told.append(everyone.gather(torch.tensor([rank, number]), Purpose.FIGURES).tolist())
        assert everyone.gather(torch.ones(0), Purpose.FIGURES).shape == (num_ranks, 0)
        return told

    expected = [[[rank, number] for rank in range(num_ranks)] for number in range(9)]
    assert run_ranks(collect, num_ranks) == [expected] * num_ranks


def test_short_facts_of_ranks_on_one_host_need_no_threads_of_gloo(monkeypatch):
    """A stall of saves was mostly that: each thread that wakes up waits for a core. Long ones go as ever."""

    def tell():
        sw.init({"run_dir": "off", "pipeline_parallel_degree": 1})
        run, all_gather, lengths = context(), dist.all_gather, []

        def noted(found, message, **options):
            lengths.append(len(message))
            return all_gather(found, message, **options)

        monkeypatch.setattr(dist, "all_gather", noted)
        texts = ["x" * length for length in (0, 3, 900, 1007, 1008, 1009, 1016, 1017, 5000)]
        told = [run.from_all_ranks((run.rank, text)) for text in texts]
        told.append(run.from_all_ranks("y" * 2000 if run.rank else ""))
        assert told == [*([(0, text), (1, text)] for text in texts), ["", "y" * 2000]]
        return lengths

    for lengths in run_ranks(tell, 2):
        assert min(lengths) > 1024
        assert 2 < len(lengths) < 8


def test_who_waits_for_a_fact_says_for_which_ranks(monkeypatch):
    """Bug: a rank that hung in a state_dict() during a save was named by nobody any more."""

    def tell():
        sw.init({"run_dir": "off", "pipeline_parallel_degree": 1})
        run, gather, found = context(), SmallCollectives.gather, []

        def noted(self, row, purpose):
            found.append(needed_by(run.watch.whereabouts.note()))
            return gather(self, row, purpose)

        monkeypatch.setattr(SmallCollectives, "gather", noted)
        run.from_all_ranks(run.rank)
        return found, needed_by(run.watch.whereabouts.note())

    assert run_ranks(tell, 2) == [([(0, 1)], ())] * 2


def test_a_run_after_another_has_memory_of_its_own():
    def twice():
        losses, num_fds = [], []
        for _ in range(3):
            sw.init({"run_dir": "off", "microbatches": 2, "profile": "estimated", "seed": 0})
            assert context().links.local_peers is not None
            model = sw.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))

            @sw.step
            def train(model, x):
                loss = model(x).square().mean()
                model.backward(loss)
                return loss

            losses.append(train(model, torch.ones(4, 4)).reduce_mean().item())
            sw.shutdown()
            del model, train
            gc.collect()
            num_fds.append(len([fd for fd in os.listdir("/proc/self/fd") if _is_of_a_link(fd)]))
        return losses, num_fds

    for losses, num_fds in run_ranks(twice, 2):
        assert len(set(losses)) == 1
        assert num_fds == [0, 0, 0]


def _is_of_a_link(fd):
    try:
        name = os.readlink(f"/proc/self/fd/{fd}")
        return "memfd:shardwright" in name and "pulse" not in name  # the process keeps that
    except OSError:
        return False
