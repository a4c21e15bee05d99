"""What layers behind and beside frozen weights keep, and take."""

import torch
from torch import nn

import shardwright.torch as sw
from shardwright.cluster import Device
from shardwright.planner import estimate_profile

DEVICE = Device(name="cpu", flops_per_s=1e10, memory_Bps=1e10, memory_bytes=2**30)


def test_a_layer_behind_frozen_ones_alone_has_a_price_of_its_own() -> None:
    """Its input needs no gradient, so that it keeps nothing; equal layers further on do."""
    norms = [nn.LayerNorm(64).requires_grad_(False) for _ in range(3)]
    model = nn.Sequential(norms[0], nn.Linear(64, 64), norms[1], nn.Linear(64, 64), norms[2])
    graph = sw.trace_model(model, torch.randn(4, 64), num_stages=5)
    first, *others = (node for node in graph.nodes if node.name in ("0", "2", "4"))
    assert first.saved_bytes == 0 < others[0].saved_bytes
    assert first.cost_class != others[0].cost_class == others[1].cost_class


def test_weights_without_gradients_take_no_time_in_the_backward() -> None:
    seconds = []
    for trained in (True, False):
        frozen = nn.Linear(512, 512, bias=False).requires_grad_(trained)
        model = nn.Sequential(nn.Linear(512, 512, bias=False), frozen)
        graph = sw.trace_model(model, torch.randn(64, 512), num_stages=2)
        costs = estimate_profile(graph, device=DEVICE).costs
        seconds.append(costs[next(node for node in graph.nodes if node.name == "1").cost_class])
    whole, part = seconds
    assert whole.backward_s > 1.5 * part.backward_s
    assert part.weight_s == 0
