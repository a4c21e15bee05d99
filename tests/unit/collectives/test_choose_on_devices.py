"""On accelerators, hops are taken where nodes allow them and their prices are lower."""

import dataclasses

import pytest

from shardwright.collectives import Topology
from shardwright.collectives.choose import COLLECTIVES
from shardwright.collectives.choose_on_devices import choose_on_devices, why_not_hierarchical
from shardwright.collectives.prices import (
    DEFAULT_PRICES,
    DevicePrices,
    Line,
    read_prices,
    typical_device_prices,
    write_prices,
)
from shardwright.errors import ConfigError

EIGHT_BY_EIGHT = Topology.from_hosts("".join(host * 8 for host in "abcdefgh"))
TWO_BY_TWO = Topology.from_hosts("aabb")


def prices_of(across, inside, everyone):
    return DevicePrices(
        everyone=dict.fromkeys(COLLECTIVES, everyone),
        across=dict.fromkeys(COLLECTIVES, across),
        inside=dict.fromkeys(COLLECTIVES, inside),
        reorder=Line(0.0, 1e15),
        source="test",
    )


def test_a_short_all_gather_over_many_nodes_waits_for_fewer_hops():
    prices = typical_device_prices(EIGHT_BY_EIGHT)
    short = choose_on_devices("all_gather", EIGHT_BY_EIGHT, count=1000, itemsize=4, prices=prices)
    assert short.candidate.name == "hierarchical"
    assert short.seconds < 0.6 * short.others["nccl"]
    long = choose_on_devices("all_gather", EIGHT_BY_EIGHT, count=10**8, itemsize=4, prices=prices)
    assert long.candidate.name == "nccl"  # whose rings use all links, too


def test_hops_in_one_piece_take_the_sum_of_their_times():
    prices = prices_of(Line(1e-3, 1e6), Line(2e-3, 1e6), Line(1.0, 1e9))
    choice = choose_on_devices("all_gather", TWO_BY_TWO, count=1000, itemsize=4, prices=prices)
    # Of the whole, 16,000 bytes, a rank brings half from the other node.
    assert choice.seconds == pytest.approx(1e-3 + 8e-3 + 2e-3 + 16e-3)
    assert choice.candidate.chunk == 0
    reduced = choose_on_devices("all_reduce", TWO_BY_TWO, count=4000, itemsize=4, prices=prices)
    assert reduced.seconds == pytest.approx(2 * (2e-3 + 16e-3) + 1e-3 + 8e-3)


def test_chunks_take_as_long_as_the_slower_lane():
    prices = prices_of(Line(0.0, 5e8), Line(0.0, 1e9), Line(0.0, 1e8))
    count = 2**26
    choice = choose_on_devices("all_gather", TWO_BY_TWO, count=count, itemsize=1, prices=prices)
    assert choice.candidate.chunk == 2**18  # a piece's share of 1 MiB
    assert choice.seconds == pytest.approx(4 * count / 1e9, rel=0.01)
    assert (
        choice.reason(1)
        == "hierarchical in chunks of 256.0 KiB, 269 ms; nccl would take 2.68 s (prices: test)"
    )


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
