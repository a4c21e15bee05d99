"""Machines by name."""

import pytest

from shardwright.cluster import node_kinds, parse_inventory
from shardwright.cluster.named import THIS_CPU
from shardwright.costs import calibration_of, calibration_of_nodes
from shardwright.errors import ConfigError


def test_every_kind_has_rates_that_can_be():
    kinds = node_kinds()
    assert {"p3.16xlarge", "p3dn.24xlarge", "p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge"} <= set(kinds)
    assert {"dgx-a100-80gb", "dgx-h100", "dgx-h200", "dgx-b200", "rtx4090x4"} <= set(kinds)
    assert {"p5e.48xlarge", "p5en.48xlarge", "p6-b200.48xlarge", "p6-b300.48xlarge"} <= set(kinds)
    assert {"p6e-gb200.36xlarge", "u-p6e-gb200x72", "g6e.48xlarge", "nd-mi300x-v5"} <= set(kinds)
    assert {"rtx5090x4", "rtx-pro-6000x4"} <= set(kinds)
    for kind in (kind for name, kind in kinds.items() if name != THIS_CPU):
        device = kind.accelerator
        assert 1e12 < min(device.flops_per_s.values()) <= max(device.flops_per_s.values()) < 1e16
        assert 10 * 2**30 < device.memory_bytes < kind.memory_bytes
        assert kind.network_Bps < kind.num_accelerators * kind.link_Bps
        assert 1e10 < kind.link_Bps < 1e12
        assert (kind.price_per_hour is None) == (kind.price_source == "")


@pytest.mark.parametrize(
    ("name", "ranks", "flops_per_s"),
    [
        ("p6-b200.48xlarge", 8, 2250e12),
        ("p6-b300.48xlarge", 8, 2250e12),
        ("p6e-gb200.36xlarge", 4, 2500e12),
        ("u-p6e-gb200x72", 72, 2500e12),
        ("nd-mi300x-v5", 8, 1307.4e12),
        ("g6e.48xlarge", 8, 362e12),
        ("rtx5090x4", 4, 209.5e12),
        ("rtx-pro-6000x4", 4, 503.8e12),
    ],
)
def test_a_family_that_nobody_measured_has_the_wide_interval(name, ranks, flops_per_s):
    kind = node_kinds()[name]
    assert (kind.num_accelerators, kind.accelerator.flops_per_s["bfloat16"]) == (ranks, flops_per_s)
    calibration = calibration_of_nodes(kind)
    measured = calibration_of_nodes(node_kinds()["p5.48xlarge"])
    assert calibration.provenance.startswith(f"not calibrated for {kind.accelerator.family}")
    assert calibration.spread >= measured.spread > calibration_of("H100", "megatron").spread


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
