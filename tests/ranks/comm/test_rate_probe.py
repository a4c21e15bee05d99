"""How fast a device computes and copies is measured, and written as a cluster."""

import torch

from shardwright.testing import run_ranks
from shardwright.torch.rank_probe import measure_memory_rates, measure_products


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
