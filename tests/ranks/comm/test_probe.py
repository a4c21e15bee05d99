"""What collectives cost is measured, and chosen by."""

import json
import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from standing_in import device_collectives

from shardwright.collectives import Topology
from shardwright.collectives.prices import DEFAULT_PRICES, read_prices, typical_device_prices, write_prices
from shardwright.comm import collective_probe as probe
from shardwright.comm.collective_probe import measure_device_prices, measure_prices
from shardwright.comm.collectives.connect import connect
from shardwright.comm.joining.process_group import default_store
from shardwright.errors import ConfigError
from shardwright.testing import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs anonymous files in memory")


def group_of(hosts, **more):
    rank = dist.get_rank()
    store = dist.PrefixStore(f"test of {hosts}", default_store())
    return connect(store, rank=rank, num_ranks=len(hosts), timeout_s=30.0, host=hosts[rank], **more)


@pytest.mark.thorough
def test_all_ranks_measure_the_same_prices_and_choose_alike():
    def measure():
        probe._ROUNDS = 2
        group = group_of("aab")
        assert "defaults" in group.prices.source
        prices = measure_prices(group)
        for line in (prices.copy, prices.combine, prices.message):
            assert 0 < line.alpha_s < 1
            assert 1e6 < line.Bps < 1e12
        assert len(prices.own) == len(prices.gloo) == 4
        for curve in prices.gloo.values():
            assert all(0 < seconds < 1 for _, seconds in curve.points)
        group.use(prices)
        data = torch.ones(3000)
        group.all_reduce(data)
        assert torch.equal(data, torch.full((3000,), 3.0))
        choices = [group.choice(kind, 3000, 4) for kind in ("all_gather", "all_reduce")]
        return prices, choices

    found = run_ranks(measure, 3, timeout_s=60)
    assert all(each == found[0] for each in found)


@pytest.mark.thorough
def test_collectives_of_devices_are_measured():
    def measure():
        group = device_collectives("aabb")
        prices = measure_device_prices(group, torch.device("cpu"), largest=2**18)
        assert prices.source.startswith(f"measured on cpu devices of {group.topology}, ")
        assert (len(prices.everyone), len(prices.across), len(prices.inside)) == (4, 4, 4)
        for line in (*prices.everyone.values(), *prices.across.values(), prices.reorder):
            assert 0 < line.alpha_s < 1
            assert 1e5 < line.Bps < 1e13
        group.prices = prices
        return prices, group.choice("all_gather", 3000, 4)

    found = run_ranks(measure, 4, timeout_s=60)
    assert all(each == found[0] for each in found)


def test_runs_take_the_prices_of_the_file_that_the_variable_names(tmp_path, monkeypatch):
    path = tmp_path / "prices.json"

    def source():
        return group_of("aa").prices.source

    monkeypatch.setenv("SHARDWRIGHT_PRICES", str(path))
    with pytest.raises(Exception, match="No such file") as caught:
        run_ranks(source, 2)
    assert caught.value.outcomes[1].error_type == ConfigError.__name__

    def write():
        group = group_of("aa", prices=None)
        if dist.get_rank() == 0:
            write_prices(path, replace(DEFAULT_PRICES, source="measured on a quiet day"), group.topology)

    monkeypatch.delenv("SHARDWRIGHT_PRICES")
    run_ranks(write, 2)
    monkeypatch.setenv("SHARDWRIGHT_PRICES", str(path))
    assert json.loads(path.read_text())["source"] in run_ranks(source, 2)
    assert str(read_prices(path)[1]) == "1 node x 2 ranks"


def test_prices_of_devices_hold_for_the_nodes_that_they_were_measured_on(tmp_path, monkeypatch):
    path = tmp_path / "prices.json"
    topology = Topology.from_hosts("ab")
    write_prices(path, replace(DEFAULT_PRICES, devices=typical_device_prices(topology)), topology)
    monkeypatch.setenv("SHARDWRIGHT_PRICES", str(path))
    assert run_ranks(lambda: group_of("ab").prices.devices, 2) == [typical_device_prices(topology)] * 2
    assert run_ranks(lambda: group_of("aa").prices.devices, 2) == [None] * 2
