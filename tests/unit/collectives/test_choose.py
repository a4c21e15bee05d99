"""Prices follow the rows, and the cheapest way is taken.

On accelerators, hops are taken where nodes allow them and their prices are lower.
"""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.collectives import Topology, all_gather, reduce_scatter
from shardwright.collectives.choose import COLLECTIVES, GLOO, ROOM_BYTES, choose, price, steps_of
from shardwright.collectives.choose_on_devices import (
    choices_by_size,
    choose_on_devices,
    crossovers,
    why_not_hierarchical,
)
from shardwright.collectives.prices import (
    DEFAULT_PRICES,
    Curve,
    Line,
    read_prices,
    typical_device_prices,
    write_prices,
)
from shardwright.collectives.steps import Routine
from shardwright.errors import ConfigError, ScheduleError

PRICES = dataclasses.replace(
    DEFAULT_PRICES,
    copy=Line(0.0, 1e9),
    combine=Line(0.0, 1e9),
    note_s=1e-5,
    message=Line(1e-4, 1e8),
    local_message=Line(1e-4, 1e9),
)
TWO_BY_TWO = Topology.from_hosts("aabb")


def test_rows_that_do_not_fit_have_no_price():
    rows = [all_gather(TWO_BY_TWO, rank, count=64, chunk=64) for rank in range(4)]
    with pytest.raises(ScheduleError, match="wait for one another for ever"):
        price(TWO_BY_TWO, [*rows[:3], []], itemsize=4, prices=PRICES)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("hosts", ["aa", "aaaa", "aabb", "aaab", "ab", "a"])
def test_the_choice_is_the_cheapest_and_fits_the_shared_memory(collective, hosts):
    topology = Topology.from_hosts(hosts)
    for count in (1, 1000, 10**6):
        choice = choose(collective, topology, count=count, itemsize=8, prices=PRICES)
        assert all(choice.seconds <= seconds for seconds in choice.others.values())
        for rank in range(len(hosts)):
            routine = Routine.of(steps_of(collective, choice.candidate, topology, rank, count=count))
            assert routine.num_shared * 8 <= ROOM_BYTES


def test_gloo_is_taken_where_it_is_cheaper():
    prices = dataclasses.replace(PRICES, gloo={"all_reduce": Curve(((0, 1e-6), (1e7, 1.0)))}, source="a test")
    small = choose("all_reduce", TWO_BY_TWO, count=2, itemsize=4, prices=prices)
    large = choose("all_reduce", TWO_BY_TWO, count=10**6, itemsize=4, prices=prices)
    assert (small.candidate.name, large.candidate.name) == (GLOO, "hierarchical")
    assert "gloo would take 400 ms (prices: a test)" in large.reason(4)
    (line,) = [
        line for line in crossovers(choices_by_size(TWO_BY_TWO, prices)) if line.startswith("all_reduce")
    ]
    assert line.startswith("all_reduce: gloo, ")


@settings(deadline=None, max_examples=30)
@given(hosts=st.lists(st.integers(0, 2), min_size=2, max_size=5), chunks=st.integers(13, 40))
def test_many_chunks_are_priced_as_if_they_were_played(hosts, chunks):
    """Only eight are played."""
    topology = Topology.from_hosts(list(map(str, hosts)))
    for collective, make in (("all_gather", all_gather), ("reduce_scatter", reduce_scatter)):
        choice = choose(collective, topology, count=chunks * 2**14, itemsize=4, prices=PRICES)
        nodes = topology.flat() if choice.candidate.name == "flat" else topology
        rows = [
            make(nodes, rank, count=chunks * 2**14, chunk=choice.candidate.chunk)
            for rank in range(topology.num_ranks)
        ]
        played = price(topology, rows, itemsize=4, prices=PRICES)
        assert choice.seconds == pytest.approx(played, rel=0.05)


def test_prices_as_a_file(tmp_path):
    path = tmp_path / "prices.json"
    prices = dataclasses.replace(PRICES, gloo={"all_gather": Curve(((0, 1e-4), (1e8, 1.0)))}, source="a test")
    write_prices(path, prices, TWO_BY_TWO)
    assert read_prices(path) == (prices, TWO_BY_TWO)
    path.write_text(path.read_text().replace('"version": 2', '"version": 1'))
    with pytest.raises(ConfigError, match="shardwright probe measures them anew") as caught:
        read_prices(path)
    assert "version is 1" in str(caught.value)
    write_prices(path, prices, TWO_BY_TWO)
    path.write_text(path.read_text().replace("100000000.0", "0"))
    with pytest.raises(ConfigError, match="the sizes must ascend"):
        read_prices(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_prices(tmp_path / "none.json")


EIGHT_BY_EIGHT = Topology.from_hosts("".join(host * 8 for host in "abcdefgh"))


def test_a_short_all_gather_over_many_nodes_waits_for_fewer_hops():
    prices = typical_device_prices(EIGHT_BY_EIGHT)
    short = choose_on_devices("all_gather", EIGHT_BY_EIGHT, count=1000, itemsize=4, prices=prices)
    assert short.candidate.name == "hierarchical"
    assert short.seconds < 0.6 * short.others["nccl"]
    long = choose_on_devices("all_gather", EIGHT_BY_EIGHT, count=10**8, itemsize=4, prices=prices)
    assert long.candidate.name == "nccl"  # whose rings use all links, too


@pytest.mark.parametrize(
    ("hosts", "collective", "why"),
    [
        ("aaaa", "all_gather", "all ranks are on one node"),
        ("abcd", "broadcast", "every rank is alone on its node"),
        ("aaab", "all_reduce", "the nodes have different numbers of ranks (3, 1)"),
        ("abab", "reduce_scatter", "the ranks of a node do not follow one another ((0, 2), (1, 3))"),
        ("abab", "all_reduce", ""),
        ("a", "all_reduce", "all ranks are on one node"),
        ("aabb", "all_gather", ""),
    ],
)
def test_where_hops_are_not_possible_the_reason_says_why(hosts, collective, why):
    topology = Topology.from_hosts(hosts)
    assert why_not_hierarchical(collective, topology) == why
    choice = choose_on_devices(
        collective, topology, count=10, itemsize=2, prices=typical_device_prices(topology)
    )
    assert (f"hierarchical is not possible: {why}" in choice.reason(2)) == bool(why)
    assert not why or choice.candidate.name == "nccl"


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("topology", [TWO_BY_TWO, EIGHT_BY_EIGHT, Topology.from_hosts("aab")])
def test_longer_ones_take_longer(collective, topology):
    prices = typical_device_prices(topology)
    times = [
        choose_on_devices(collective, topology, count=10**power, itemsize=4, prices=prices).seconds
        for power in range(9)
    ]
    assert times == sorted(times)


def test_prices_of_devices_stand_in_the_file(tmp_path):
    path = tmp_path / "prices.json"
    prices = dataclasses.replace(DEFAULT_PRICES, devices=typical_device_prices(TWO_BY_TWO))
    write_prices(path, prices, TWO_BY_TWO)
    assert read_prices(path) == (prices, TWO_BY_TWO)
    path.write_text(path.read_text().replace('"reorder"', '"order"'))
    with pytest.raises(ConfigError, match="devices"):
        read_prices(path)
