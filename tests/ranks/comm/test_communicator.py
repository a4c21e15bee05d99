"""Collectives give what torch.distributed's own give, over whatever nodes."""

import os
import signal
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from collective_data import data_of, reduced

from choices import some_combinations
from shardwright.collectives.choose import COLLECTIVES, Candidate, steps_of
from shardwright.collectives.prices import DEFAULT_PRICES, Curve
from shardwright.collectives.steps import Routine
from shardwright.comm.collectives.connect import connect
from shardwright.comm.collectives.reduction import Reduction
from shardwright.comm.joining.process_group import default_store
from shardwright.errors import PeerLostError, PeerTimeoutError, TraceMismatchError, UsageError
from shardwright.testing import run_ranks, run_ranks_outcomes

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs anonymous files in memory")

# Nothing; less than a block; odd; several chunks of every kind.
COUNTS = [0, 1, 5, 1000, 200_003]


def communicator(hosts, timeout_s=30.0, name="group", **more):
    rank = dist.get_rank()
    return connect(
        dist.PrefixStore(f"test of {name} {hosts}", default_store()),
        rank=rank,
        num_ranks=dist.get_world_size(),
        timeout_s=timeout_s,
        host=hosts[rank],
        name=name,
        **more,
    )


@pytest.mark.parametrize("hosts", ["a", "aa", "ab", "aab", "aabb", "abab", "aaabb"])
def test_every_collective_gives_every_rank_the_right_elements(hosts):
    num_ranks = len(hosts)

    def compare():
        group, rank = communicator(hosts), dist.get_rank()
        for count in COUNTS:
            pieces = [data_of(other, count) for other in range(num_ranks)]
            gathered = torch.full((num_ranks * count,), 77.0, dtype=torch.float64)
            group.all_gather(gathered, pieces[rank])
            assert torch.equal(gathered, torch.cat(pieces))

            wholes = [data_of(other, num_ranks * count) for other in range(num_ranks)]
            total = torch.stack(wholes).sum(0)
            scattered = torch.full((count,), 77.0, dtype=torch.float64)
            group.reduce_scatter(scattered, wholes[rank].clone())
            assert torch.equal(scattered, total[rank * count : (rank + 1) * count])

            reduced = wholes[rank].clone()
            group.all_reduce(reduced)
            assert torch.equal(reduced, total)

            for source in range(num_ranks):
                told = pieces[rank].clone()
                group.broadcast(told, source)
                assert torch.equal(told, pieces[source])
        group.close()

    run_ranks(compare, num_ranks, timeout_s=60)


def test_collectives_may_be_in_place():
    def compare():
        group, rank = communicator("aabb"), dist.get_rank()
        for count in (7, 100_001):
            gathered = torch.zeros(4 * count, dtype=torch.float64)
            mine = gathered[rank * count : (rank + 1) * count]
            mine.copy_(data_of(rank, count))
            group.all_gather(gathered, mine)
            assert torch.equal(gathered, torch.cat([data_of(other, count) for other in range(4)]))

    run_ranks(compare, 4)


@pytest.mark.parametrize(
    ("name", "dtype"),
    some_combinations(
        ["SUM", "AVG", "MIN", "MAX", "PRODUCT"], [torch.float32, torch.bfloat16, torch.float16, torch.int64]
    ),
)
def test_reductions_of_every_type(name, dtype):
    if name == "AVG" and not dtype.is_floating_point:
        pytest.skip("there are no averages of integers")

    def compare():
        group, rank = communicator("aab"), dist.get_rank()
        wholes = [data_of(other, 3000).clamp(-2, 2).to(dtype) for other in range(3)]
        expected = reduced(name, wholes)
        found = wholes[rank].clone()
        group.all_reduce(found, Reduction.of(getattr(dist.ReduceOp, name)))
        torch.testing.assert_close(found, expected.to(dtype))

    run_ranks(compare, 3)


def test_sums_are_the_same_in_every_run():
    """They are taken in the order of the ranks, whoever comes first."""

    def total():
        group = communicator("aabb")
        values = torch.randn(5000, generator=torch.Generator().manual_seed(dist.get_rank()))
        group.all_reduce(values)
        return values

    first, second = run_ranks(total, 4), run_ranks(total, 4)
    assert all(torch.equal(value, first[0]) for value in [*first, *second])


def test_collectives_on_the_thread_come_in_order():
    def compare():
        group, rank = communicator("aa"), dist.get_rank()
        values = [data_of(rank, 50_000 + i) for i in range(20)]
        futures = [group.thread.submit(lambda v=v: group.all_reduce(v)) for v in values[:-1]]
        group.thread.run(lambda: group.all_reduce(values[-1]))
        assert all(future.done() for future in futures)
        for i, value in enumerate(values):
            assert torch.equal(value, data_of(0, 50_000 + i) + data_of(1, 50_000 + i))

    run_ranks(compare, 2)


def test_collectives_that_share_no_memory_may_come_between_others():
    """The half of the memory that a collective uses was picked by the number of all that came before."""

    def compare():
        prices = replace(DEFAULT_PRICES, note_s=1.0)  # a flat broadcast is cheaper
        group, rank = communicator("aabb", prices=prices), dist.get_rank()
        assert group.choice("broadcast", 4, 8).candidate.name == "flat"
        assert group.choice("all_gather", 20_000, 8).candidate.name == "flat"
        way = Candidate("hierarchical", 20_000)
        routine = Routine.of(steps_of("all_gather", way, group.topology, rank, count=20_000))
        for turn in range(10):
            mine = data_of(10 * turn + rank, 20_000)
            gathered = torch.zeros(80_000, dtype=torch.float64)
            group.run_routine("a gather", routine, mine, gathered)
            assert torch.equal(gathered, torch.cat([data_of(10 * turn + r, 20_000) for r in range(4)]))
            told = data_of(rank, 4)
            group.broadcast(told, 1)
            assert torch.equal(told, data_of(1, 4))

    run_ranks(compare, 4)


def test_a_task_may_ask_for_collectives_itself():
    """As a callback does, and as the Communicator's own methods do when they are called in a task."""

    def nest():
        group = communicator("aa")
        data = torch.ones(10)

        def outer():
            group.all_reduce(data)
            return group.thread.submit(lambda: group.all_reduce(data)).wait()

        group.thread.submit(outer).wait()
        group.thread.run(outer)
        group.thread.submit(lambda: None).then(lambda _: group.all_reduce(data)).wait()
        return data[0].item()

    assert run_ranks(nest, 2) == [32.0, 32.0]


def test_inference_mode_comes_and_goes():
    def alternate():
        group = communicator("aabb")
        with torch.inference_mode():
            first = torch.ones(200_000)
            group.thread.submit(lambda: group.all_reduce(first)).wait()
        second = torch.ones(200_000, requires_grad=True)
        group.all_reduce(second)
        return first[-1].item(), second[-1].item()

    assert run_ranks(alternate, 4) == [(4.0, 4.0)] * 4


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn])
def test_elements_of_any_type_are_copied(dtype):
    def compare():
        free = Curve(((0, 1e-12),))
        prices = replace(DEFAULT_PRICES, gloo=dict.fromkeys(COLLECTIVES, free), source="gloo is free")
        for name in ("default", "gloo"):
            more = {"prices": prices} if name == "gloo" else {}
            group = communicator("aab", name=name, **more)
            pieces = [data_of(rank, 33).to(dtype) for rank in range(3)]
            gathered = torch.cat(pieces).clone().zero_()
            group.all_gather(gathered, pieces[dist.get_rank()])
            assert torch.equal(gathered.view(torch.uint8), torch.cat(pieces).view(torch.uint8))
            if dtype is torch.int16:  # which gloo cannot sum
                group.all_reduce(pieces[0])

    run_ranks(compare, 3)


def test_what_a_type_cannot_do_is_refused_before_anybody_waits():
    def refuse():
        group = communicator("aa")
        with pytest.raises(UsageError, match=r"AVG cannot reduce elements of torch\.int64"):
            group.all_reduce(torch.ones(5, dtype=torch.int64), Reduction("AVG"))
        with pytest.raises(UsageError, match=r"BAND cannot reduce elements of torch\.float32"):
            group.all_reduce(torch.ones(5), Reduction("BAND"))
        data = torch.ones(5)
        group.all_reduce(data)  # the group is as good as before
        return data[0].item()

    assert run_ranks(refuse, 2) == [2.0, 2.0]


def test_a_rank_that_gives_up_tells_its_neighbours():
    """Rank 2 of another node dies; rank 1 waits for rank 0, which has noticed."""

    def gather():
        group, rank = communicator("aab"), dist.get_rank()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        data = torch.zeros(300_000)
        with pytest.raises(PeerLostError) as caught:
            group.all_gather(data, data[:100_000].clone())
        return caught.value.rank

    outcomes = run_ranks_outcomes(gather, 3, timeout_s=20)
    assert outcomes[0].value in (1, 2)
    assert outcomes[1].value in (0, 2)


def test_a_killed_rank_is_named_at_once():
    def gather():
        group = communicator("aaa")
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLostError, match=r"all_gather of 10 float64 .* rank 1 is lost") as caught:
            group.all_gather(torch.zeros(30, dtype=torch.float64), data_of(0, 10))
        with pytest.raises(UsageError, match="an earlier collective of this group failed"):
            group.all_gather(torch.zeros(30, dtype=torch.float64), data_of(0, 10))
        return caught.value.rank

    outcomes = run_ranks_outcomes(gather, 3, timeout_s=20)
    assert [outcome.exit_code for outcome in outcomes] == [0, -signal.SIGKILL, 0]
    assert {outcomes[0].value, outcomes[2].value} == {1}


def test_a_silent_rank_is_named_when_the_time_is_up():
    def gather():
        group = communicator("aa", timeout_s=1.0)
        if dist.get_rank() == 0:
            with pytest.raises(PeerTimeoutError, match="rank 1 did not come within 1 s") as caught:
                group.all_gather(torch.zeros(20, dtype=torch.float64), data_of(0, 10))
            return caught.value.rank
        time.sleep(2.5)
        return None

    assert run_ranks(gather, 2) == [1, None]


def test_ranks_in_different_collectives_are_told():
    def mixed():
        group = communicator("aa")
        data = torch.zeros(50_000)
        calls = [lambda: group.all_reduce(data), lambda: group.all_gather(data.repeat(2), data)]
        with pytest.raises(TraceMismatchError, match=r"rank \d is in all_[\w ]+ of .* where rank"):
            calls[dist.get_rank()]()

    run_ranks(mixed, 2)


def test_tensors_that_do_not_fit_are_refused():
    def refuse():
        group = communicator("aa")
        with pytest.raises(UsageError, match="all_gather over 2 ranks takes 3 elements and gives 6"):
            group.all_gather(torch.zeros(5), torch.zeros(3))
        with pytest.raises(UsageError, match="reduce_scatter over 2 ranks"):
            group.reduce_scatter(torch.zeros(1), torch.zeros(3))
        with pytest.raises(UsageError, match="must be the same"):
            group.all_gather(torch.zeros(6, dtype=torch.float64), torch.zeros(3))
        with pytest.raises(UsageError, match=r"Pass input.contiguous\(\)"):
            group.all_reduce(torch.zeros(4, 4).t()[1:])
        with pytest.raises(UsageError, match="the reduction PREMUL_SUM is none of those"):
            Reduction.of("PREMUL_SUM")

    run_ranks(refuse, 2)
