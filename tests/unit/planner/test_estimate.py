"""Profiles without measurement."""

import pytest
from graphs import GraphBuilder

from shardwright.cluster import Device
from shardwright.planner import estimate_profile

DEVICE = Device(name="paper", flops_per_s=1e9, memory_Bps=1e6, overhead_s=1e-3)


def test_roofline_adds_up() -> None:
    builder = GraphBuilder()
    weight = builder.parameter("w", 600)
    a = builder.unit("a", output_bytes=200, cost_class="a", requires_grad=False)
    b = builder.unit("b", [a], output_bytes=200, parameters=[weight], cost_class="b", flops=7 * 10**8)
    profile = estimate_profile(builder.graph(loss=b), device=DEVICE)
    cost = profile.costs["b"]
    # 1 ms overhead + 0.7 GFLOP at 70 % of 1 GFLOP/s + 1000 bytes at 1 MB/s.
    assert cost.forward_s == pytest.approx(0.001 + 1.0 + 0.001)
    assert cost.backward_s == pytest.approx(2 * (0.001 + 1.0) + 1.6 * 0.001)
    assert cost.weight_s == pytest.approx(1.0)
    assert (cost.input_bytes, cost.flops) == (200, 7 * 10**8)
    assert cost.provenance == "estimated"
    assert profile.device == "paper"


def test_no_backward_without_gradients() -> None:
    builder = GraphBuilder()
    a = builder.unit("a", requires_grad=False)
    assert estimate_profile(builder.graph(loss=a), device=DEVICE).costs["block"].backward_s == 0.0
