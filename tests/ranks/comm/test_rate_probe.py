"""How fast a device computes and copies is measured, and written as a cluster."""

import sys

import pytest
import torch

from fits import too_wide
from shardwright.cluster.cluster_file import read_inventory
from shardwright.comm.probe_ranks import measure_memory_rates, measure_products
from shardwright.testing import run_ranks


def rates():
    torch.distributed.barrier()
    sizes = []
    found = measure_products(torch.device("cpu"), "float32", progress=lambda: sizes.append(1))
    memory = measure_memory_rates(torch.device("cpu"))
    return found, len(sizes), memory


def test_all_ranks_find_the_same_rates():
    (first, number, memory), (second, *_) = run_ranks(rates, 2, timeout_s=100)
    assert first == second
    assert number == len(first) >= 5
    assert all(1e8 < rate.together < 1e14 and 1e8 < rate.alone < 1e14 for rate in first)
    large, small = first[4], first[0]
    assert large.rows > small.rows
    assert large.together > small.together / 2
    assert 1e8 < memory.memory_Bps < 1e13
    assert memory.host_Bps == 0.0


def unknown_dtype():
    return measure_products(torch.device("cpu"), "bits8", progress=lambda: None)


def test_a_type_that_cannot_be_multiplied_has_no_rates():
    assert run_ranks(unknown_dtype, 2) == [(), ()]


def probe(folder):
    from shardwright.comm import collective_probe as probe
    from shardwright.comm import probe_ranks
    from shardwright.torch.rank_probe import main

    # What is measured is not looked at: once is enough.
    probe._ROUNDS, probe_ranks._ROUNDS, probe_ranks._LONGEST_S = 1, 1, 0.03
    sys.argv = ["probe", f"{folder}/prices.json", f"{folder}/cluster.yaml"]
    main()


@pytest.mark.thorough
def test_the_present_machines_are_a_cluster(tmp_path):
    from shardwright.cli.commands.catalogue import format_machines
    from shardwright.cli.commands.probe import choices_text
    from shardwright.collectives.prices import read_prices

    run_ranks(probe, 2, str(tmp_path), timeout_s=150)
    machines = read_inventory(tmp_path / "cluster.yaml")
    for text in (format_machines(machines), choices_text(tmp_path / "prices.json")):
        assert too_wide(text, folds=True) == []
    ((kind, number),) = machines.nodes
    assert (number, kind.num_accelerators) == (1, 2)
    assert kind.source == kind.accelerator.source == "measured"
    assert set(machines.collectives) == {"all_gather", "reduce_scatter", "all_reduce", "broadcast"}
    for points in machines.collectives.values():
        assert [size for size, _ in points] == sorted(size for size, _ in points)
    assert "shardwright" in machines.measured
    prices, topology = read_prices(tmp_path / "prices.json")
    assert topology.num_ranks == 2
    assert prices.source.startswith("measured on")
