"""Streams wait for one another where they must, and nowhere else; a model of streams stands in for CUDA."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from shardwright.comm.collectives.device_collectives import reductions_of_hops
from shardwright.comm.collectives.device_lanes import Hop, Hops, StreamLanes


class Stream:
    """What is behind it: all that was done on it or waited for."""

    def __init__(self, *_, **__):
        self.behind = set()

    def wait_stream(self, other):
        self.behind |= other.behind

    def record_event(self):
        event = Stream()
        event.behind = set(self.behind)
        return event

    wait_event = wait_stream

    def query(self):
        return True


class Cuda:
    """`torch.cuda` as far as lanes use it."""

    Stream = Stream

    def __init__(self):
        self.current = Stream()

    def current_stream(self, _):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


class Result:
    """A tensor."""

    device = torch.device("cuda", 0)

    def __init__(self):
        self.streams = []

    def record_stream(self, stream):
        self.streams.append(stream)


@pytest.mark.parametrize(
    "lanes", [["across", "inside"], ["inside", "across"], ["inside", "across", "inside"]]
)
@pytest.mark.parametrize("num_chunks", [1, 2, 5])
def test_a_hop_is_behind_the_hop_before_and_what_the_caller_did(lanes, num_chunks):
    cuda = Cuda()
    cuda.current.behind.add("before")
    behind = {}

    def hop(number):
        def do(chunk):
            behind[number, chunk] = set(cuda.current.behind)
            cuda.current.behind.add((number, chunk))

        return Hop(lanes[number], do)

    result, read = Result(), Result()
    hops = Hops([hop(number) for number in range(len(lanes))], num_chunks)
    work = StreamLanes(cuda).run(hops, [result], reads=[read], waits=False)
    assert len(behind) == len(lanes) * num_chunks
    for (number, chunk), earlier in behind.items():
        assert "before" in earlier
        assert number == 0 or (number - 1, chunk) in earlier
    assert cuda.current.behind == {"before"}
    assert len(result.streams) == len(read.streams) == 2
    work.wait()
    assert cuda.current.behind == {"before", *behind}
    assert work.is_completed()
    assert work.result() == [result]


def test_chunks_of_both_lanes_go_at_the_same_time():
    cuda = Cuda()
    behind = {}

    def do(lane):
        def issue(chunk):
            behind[lane, chunk] = set(cuda.current.behind)
            cuda.current.behind.add((lane, chunk))

        return issue

    hops = Hops([Hop("across", do("across")), Hop("inside", do("inside"))], 3)
    StreamLanes(cuda).run(hops, [Result()], reads=[], waits=True)
    assert behind["across", 2] == {("across", 0), ("across", 1)}
    assert ("across", 1) not in behind["inside", 0]


def test_who_waits_for_the_last_collective_or_for_all_has_those_before():
    cuda = Cuda()
    lanes = StreamLanes(cuda)

    def on(lane):
        return Hops([Hop(lane, lambda _: cuda.current.behind.add(lane))], 1)

    lanes.run(on("across"), [Result()], reads=[], waits=False)
    work = lanes.run(on("inside"), [Result()], reads=[], waits=False)
    work.wait()
    assert cuda.current.behind == {"across", "inside"}
    cuda.current = Stream()
    lanes.join()
    assert cuda.current.behind == {"across", "inside"}


def test_a_factor_counts_once():
    op = dist._make_nccl_premul_sum(2.0)
    assert reductions_of_hops(op) == (op, dist.ReduceOp.SUM)
    assert reductions_of_hops(dist.ReduceOp.AVG) == (dist.ReduceOp.AVG, dist.ReduceOp.AVG)
