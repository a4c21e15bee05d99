"""The price of computing, and what it is worked out with on some machines."""

from dataclasses import replace

import pytest

from shardwright.cluster import Rate, parse_inventory
from shardwright.costs import calibration_of, calibration_of_nodes
from shardwright.costs.calibration import ACTION_S, STEP_S
from shardwright.costs.links import RankRates
from shardwright.model_graph import Work

REACHED = replace(
    calibration_of("A100").efficiencies,
    matmul=0.5,
    matmul_factor=1.0,
    memory=0.5,
    elementwise=2.0,
    kernel_s=1e-3,
    flash_forward=0.25,
    flash_backward=0.5,
)
RANK = RankRates(peak=1e12, memory=1e9, reached=REACHED)


def test_a_price_is_that_of_its_parts():
    products = RANK.price(Work(products=1, product_flops=1e12, product_bytes=1e9))
    assert products == pytest.approx((1e-3 + 2 + 2, 2 * (1e-3 + 2 + 2), 1e-3 + 2 + 2))
    attention = RANK.price(Work(attention_flops=1e12))
    assert attention == pytest.approx((4.0, 5.0, 0.0))
    rest = RANK.price(Work(kernels=2, moved_bytes=1e9))
    assert rest == pytest.approx((2e-3 + 4, 1.6 * (2e-3 + 4), 0.0))


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
