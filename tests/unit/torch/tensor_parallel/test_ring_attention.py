"""Attention in a ring of ranks equals that of one process, forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from ranks_in_threads import on_ranks

from shardwright.placement import BetweenUnits, Cut
from shardwright.torch.tensor_parallel.divided_tensor import divided, whole
from shardwright.torch.tensor_parallel.group import Prices, Traffic
from shardwright.torch.tensor_parallel.rules import ring_attention

BATCH, SIZE = 2, 8


@pytest.fixture(autouse=True)
def long_enough(monkeypatch):
    monkeypatch.setattr(ring_attention, "LONG_BYTES", 0)


def attention(num_ranks, *, heads=1, queries=11, keys=11, causal, dtype=torch.float64):
    """What each rank sends, in a ring, of attention that is checked against that of one process."""
    torch.manual_seed(0)
    shapes = [(BATCH, heads, queries, SIZE), *[(BATCH, heads, keys, SIZE)] * 2]
    leaves = [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    wanted = F.scaled_dot_product_attention(*leaves, is_causal=causal)
    wanted.square().sum().backward()
    tolerance = {torch.float64: 1e-10, torch.bfloat16: 5e-2}[dtype]

    def on_rank(group):
        group.prices = Prices(latency_s=0.0)
        group.shares(BetweenUnits(num_ranks, 2, frozenset([queries, keys])))
        cuts = [Cut.even(2, each.shape[2], num_ranks=num_ranks) for each in leaves]
        own = [
            divided(each.detach(), cut, group).requires_grad_()
            for each, cut in zip(leaves, cuts, strict=True)
        ]
        found = F.scaled_dot_product_attention(*own, is_causal=causal)
        found.square().sum().backward()
        traffic, group.traffic = group.traffic, Traffic()
        torch.testing.assert_close(whole(found), wanted.detach(), rtol=tolerance, atol=tolerance)
        for have, want in zip(own, leaves, strict=True):
            torch.testing.assert_close(whole(have.grad), want.grad, rtol=tolerance, atol=tolerance)
        return traffic

    return on_ranks(num_ranks, on_rank)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_ring_is_exact(num_ranks, causal):
    """One head, which ranks cannot share; lengths that do not divide."""
    for traffic in attention(num_ranks, causal=causal):
        # Keys and values go around in the forward and in the backward, which sends their gradients, too.
        assert traffic.calls["all_to_all"] >= 3 * (num_ranks - 1)
        assert traffic.calls["all_gather"] == traffic.calls["reduce_scatter"] == 0


def test_a_ring_sends_what_gathering_sends():
    """Each rank sends every other rank's worth of one block, twice, and gradients once."""
    size = BATCH * 4 * SIZE * 8
    (traffic, *_) = attention(3, queries=12, keys=12, causal=True)
    assert traffic.sent_bytes["all_to_all"] == 3 * 2 * 2 * size


def test_other_masks_do_not_go_around():
    torch.manual_seed(0)
    q, k, v = (torch.randn(BATCH, 1, 8, SIZE, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(8, 8) > 0.3
    mask |= torch.eye(8, dtype=torch.bool)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def on_rank(group):
        group.shares(BetweenUnits(2, 2, frozenset([8])))
        own = [divided(each, Cut.even(2, 8, num_ranks=2), group) for each in (q, k, v)]
        found = F.scaled_dot_product_attention(*own, attn_mask=mask)
        traffic, group.traffic = group.traffic, Traffic()
        torch.testing.assert_close(whole(found), wanted, rtol=1e-10, atol=1e-10)
        return traffic

    for traffic in on_ranks(2, on_rank):
        assert traffic.calls["all_gather"] == 2
