"""Machines by name."""

import pytest

from shardwright.cluster import node_kinds, parse_inventory
from shardwright.cluster.named import THIS_CPU
from shardwright.errors import ConfigError


def test_every_kind_has_rates_that_can_be():
    kinds = node_kinds()
    assert {"p3.16xlarge", "p3dn.24xlarge", "p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge"} <= set(kinds)
    assert {"dgx-a100-80gb", "dgx-h100", "dgx-h200", "dgx-b200", "rtx4090x4"} <= set(kinds)
    for kind in (kind for name, kind in kinds.items() if name != THIS_CPU):
        device = kind.accelerator
        assert 1e12 < min(device.flops_per_s.values()) <= max(device.flops_per_s.values()) < 1e16
        assert 10 * 2**30 < device.memory_bytes < kind.memory_bytes
        assert kind.network_Bps < kind.num_accelerators * kind.link_Bps < 1e13
        assert (kind.price_per_hour is None) == (kind.price_source == "")


def test_several_kinds():
    machines = parse_inventory("p4d.24xlarge * 4+P5.48xlarge*2")
    assert (machines.num_nodes, machines.num_ranks) == (6, 48)
    assert machines.price_per_hour == pytest.approx(4 * 32.7726 + 2 * 98.32)
    assert parse_inventory("dgx-h100*3").price_per_hour is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("p4.24xlarge", r"no machines called 'p4.24xlarge'; did you mean p4d\.24xlarge"),
        ("zzzz", r"known are p3\.16xlarge"),
        ("dgx-h100*0", "'0' in 'dgx-h100.0' is not a number of nodes: take 1 to 100000"),
        ("dgx-h100*-1", "'-1'"),
        ("dgx-h100*1e9", "'1e9'"),
        ("dgx-h100*999999999999", "take 1 to 100000"),
        ("", "is not a kind of node"),
        ("dgx-h100 +", "is not a kind of node"),
    ],
)
def test_what_is_no_machine(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_inventory(text)
