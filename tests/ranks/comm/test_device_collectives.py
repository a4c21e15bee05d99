"""Collectives in hops give what gloo's own give; gloo stands in for NCCL."""

import pytest
import torch
import torch.distributed as dist
from collective_data import data_of, reduced
from standing_in import device_collectives, device_prices
from torch.distributed.distributed_c10d import AllgatherOptions

from choices import some_combinations
from shardwright.errors import UsageError
from shardwright.testing import run_ranks

# Nothing; less than a rank of a node gets; odd; several chunks.
COUNTS = [0, 1, 5, 1001, 200_003]


def gather(group, output, data, *, waits=True):
    opts = AllgatherOptions()
    opts.asyncOp = not waits
    return group.all_gather([output], [data], opts)


def scatter(group, output, data, op=dist.ReduceOp.SUM):
    opts = dist.ReduceScatterOptions()
    opts.reduceOp, opts.asyncOp = op, False
    group.reduce_scatter([output], [data], opts).wait()


def reduce(group, data, op=dist.ReduceOp.SUM, *, waits=True):
    opts = dist.AllreduceOptions()
    opts.reduceOp, opts.asyncOp = op, not waits
    return group.all_reduce([data], opts)


def tell(group, data, source):
    opts = dist.BroadcastOptions()
    opts.rootRank, opts.asyncOp = source, False
    group.broadcast([data], opts).wait()


@pytest.mark.parametrize("hosts", ["aabb", "aaaa", "aaab", "abab"])
def test_every_collective_gives_every_rank_the_right_elements(hosts):
    num_ranks = len(hosts)

    def compare():
        group, rank = device_collectives(hosts), dist.get_rank()
        for count in COUNTS:
            pieces = [data_of(other, count) for other in range(num_ranks)]
            gathered = torch.full((num_ranks * count,), 77.0, dtype=torch.float64)
            gather(group, gathered, pieces[rank]).wait()
            assert torch.equal(gathered, torch.cat(pieces))

            wholes = [data_of(other, num_ranks * count) for other in range(num_ranks)]
            total = torch.stack(wholes).sum(0)
            scattered, mine = torch.full((count,), 77.0, dtype=torch.float64), wholes[rank].clone()
            scatter(group, scattered, mine)
            assert torch.equal(scattered, total[rank * count : (rank + 1) * count])
            assert torch.equal(mine, wholes[rank])

            reduced = wholes[rank].clone()
            reduce(group, reduced).wait()
            assert torch.equal(reduced, total)

            for source in range(num_ranks):
                told = pieces[rank].clone()
                tell(group, told, source)
                assert torch.equal(told, pieces[source])
        return {
            kind: group.choice(kind, 200_003, 8)
            for kind in ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
        }

    choices = run_ranks(compare, num_ranks, timeout_s=60)[0]
    possible = {"aabb": 4, "abab": 2}.get(hosts, 0)
    names = [choice.candidate.name for choice in choices.values()]
    assert names.count("hierarchical") == possible
    for choice in choices.values():
        if choice.candidate.name == "hierarchical":
            assert 0 < choice.candidate.chunk < 200_003
        else:
            assert "hierarchical is not possible: " in choice.reason(8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.complex64])
def test_copies_are_those_of_gloo(dtype):
    def compare():
        group, rank = device_collectives("aabb"), dist.get_rank()
        for count in (7, 100_003):
            mine = torch.randn(count, generator=torch.Generator().manual_seed(rank)).mul(9).to(dtype)
            ours, theirs = (torch.zeros(4 * count, dtype=dtype) for _ in range(2))
            gather(group, ours, mine).wait()
            dist.all_gather_single(theirs, mine)
            assert torch.equal(ours, theirs)
            told = mine.clone()
            tell(group, told, 1)
            assert torch.equal(told, theirs[count : 2 * count])

    run_ranks(compare, 4)


@pytest.mark.parametrize(
    ("name", "dtype"),
    some_combinations(["SUM", "AVG", "MIN", "MAX", "PRODUCT"], [torch.bfloat16, torch.float32, torch.int64]),
)
def test_reductions_of_every_type(name, dtype):
    if name == "AVG" and not dtype.is_floating_point:
        pytest.skip("there are no averages of integers")

    def compare():
        group, rank = device_collectives("aabb"), dist.get_rank()
        wholes = [data_of(other, 4003).clamp(-2, 2).to(dtype) for other in range(4)]
        expected = reduced(name, wholes).to(dtype)
        found = wholes[rank].clone()
        reduce(group, found, getattr(dist.ReduceOp, name)).wait()
        torch.testing.assert_close(found, expected)
        scattered = torch.zeros(1000, dtype=dtype)
        scatter(group, scattered, wholes[rank][:4000], getattr(dist.ReduceOp, name))
        torch.testing.assert_close(scattered, expected[1000 * rank : 1000 * (rank + 1)])

    run_ranks(compare, 4)


def test_sums_of_complex_numbers():
    def compare():
        group = device_collectives("aabb")
        data = torch.full((5,), 1 + 2j)
        reduce(group, data).wait()
        assert torch.equal(data, torch.full((5,), 4 + 8j))

    run_ranks(compare, 4)


def test_collectives_may_be_in_place():
    def compare():
        group, rank = device_collectives("aabb"), dist.get_rank()
        for count in (7, 200_001):
            gathered = torch.zeros(4 * count, dtype=torch.float64)
            mine = gathered[rank * count : (rank + 1) * count]
            mine.copy_(data_of(rank, count))
            gather(group, gathered, mine).wait()
            assert torch.equal(gathered, torch.cat([data_of(other, count) for other in range(4)]))
            part = gathered[rank * count : (rank + 1) * count]
            expected = 4 * part
            scatter(group, part, gathered)
            assert torch.equal(part, expected)

    run_ranks(compare, 4)


def test_asynchronous_collectives_come_in_order():
    def compare():
        group, rank = device_collectives("aabb"), dist.get_rank()
        values = [data_of(rank, 1000 + i) for i in range(10)]
        works = [reduce(group, value, waits=False) for value in values]
        gathered = torch.zeros(4 * 1000, dtype=torch.float64)
        works[0].wait()
        last = gather(group, gathered, values[0], waits=False)
        assert last.get_future().wait()[0].data_ptr() == gathered.data_ptr()
        assert all(work.is_completed() for work in works)
        for i, value in enumerate(values):
            assert torch.equal(value, sum(data_of(other, 1000 + i) for other in range(4)))
        assert torch.equal(gathered, values[0].repeat(4))

    run_ranks(compare, 4)


def test_several_at_once_go_over_all_ranks():
    def compare():
        group, rank = device_collectives("aabb"), dist.get_rank()
        outputs = [torch.zeros(4 * count) for count in (3, 5)]
        inputs = [torch.full((count,), float(rank)) for count in (3, 5)]
        group.all_gather(outputs, inputs, AllgatherOptions()).wait()
        for output, data in zip(outputs, inputs, strict=True):
            assert torch.equal(output, torch.arange(4.0).repeat_interleave(data.numel()))
        group.reduce_scatter(inputs, outputs, dist.ReduceScatterOptions()).wait()
        assert [data.unique().tolist() for data in inputs] == [[4.0 * rank]] * 2

    run_ranks(compare, 4)


def test_groups_are_made_when_they_are_needed():
    def look():
        group = device_collectives("aabb", prices=device_prices(everyone_s=0.0, start_s=1e-3))
        assert group.choice("all_reduce", 10, 4).candidate.name == "nccl"
        made = [sorted(group._groups)]
        reduce(group, torch.ones(10)).wait()
        made.append(sorted(group._groups))
        reduce(group, torch.ones(10_000)).wait()
        made.append(sorted(group._groups))
        return made

    assert run_ranks(look, 4)[0] == [[], ["everyone"], ["across", "everyone", "inside"]]


def test_what_does_not_fit_is_refused_before_anybody_waits():
    def refuse():
        group = device_collectives("aabb")
        with pytest.raises(UsageError, match="the whole has 19 elements"):
            gather(group, torch.zeros(19), torch.zeros(5))
        with pytest.raises(UsageError, match=r"the piece 5 of torch\.int64"):
            scatter(group, torch.zeros(5, dtype=torch.int64), torch.zeros(20))
        with pytest.raises(UsageError, match="contiguous"):
            gather(group, torch.zeros(5, 4).t(), torch.zeros(5))
        with pytest.raises(UsageError, match="without holes"):
            reduce(group, torch.zeros(10)[::2])

    run_ranks(refuse, 4)
