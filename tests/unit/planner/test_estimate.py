"""Profiles without measurement."""

from dataclasses import replace

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


def test_a_backward_that_leaves_nothing_for_later_is_in_one_piece() -> None:
    """Under autocast a zero-bubble schedule was chosen for a split that does not happen."""
    builder = GraphBuilder()
    weight = builder.parameter("w", 600)
    graph = builder.graph(loss=builder.unit("a", parameters=[weight], cost_class="a", flops=7 * 10**8))
    whole = replace(graph, nodes=tuple(replace(node, weight_bytes=0) for node in graph.nodes))
    split, in_one = (estimate_profile(each, device=DEVICE).costs["a"] for each in (graph, whole))
    assert split.weight_s > 0
    assert in_one.weight_s == 0.0
    assert in_one.backward_s == split.backward_s


def test_no_backward_without_gradients() -> None:
    builder = GraphBuilder()
    a = builder.unit("a", requires_grad=False)
    assert estimate_profile(builder.graph(loss=a), device=DEVICE).costs["block"].backward_s == 0.0
