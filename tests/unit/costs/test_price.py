"""The price of computing, and what it is worked out with on some machines."""

from dataclasses import replace

from shardwright.cluster import Rate, parse_inventory
from shardwright.costs import calibration_of, calibration_of_nodes
from shardwright.costs.calibration import ACTION_S, STEP_S


def test_the_own_runtime_takes_what_was_measured():
    for family in ("A100", "TPU"):
        own = calibration_of(family).efficiencies
        assert (own.step_s, own.microbatch_s) == (STEP_S, 2 * ACTION_S)
    assert calibration_of("A100", "megatron").efficiencies.step_s != STEP_S


def test_what_was_measured_is_reached_in_full():
    kind, _ = parse_inventory("p4d.24xlarge").nodes[0]
    rate = Rate(rows=1, inner=1, columns=1, alone=1.0, together=1.0)
    chip = replace(kind.accelerator, products={"bfloat16": (rate,)})
    found = calibration_of_nodes(replace(kind, accelerator=chip)).efficiencies
    assert (found.matmul, found.memory, found.link) == (1.0, 1.0, calibration_of("A100").efficiencies.link)
    found = calibration_of_nodes(replace(kind, source="measured")).efficiencies
    assert found.link == found.reduce_network == found.point_to_point == 1.0
    assert found.matmul < 1
