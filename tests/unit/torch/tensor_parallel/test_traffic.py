"""What parts of models send: no more than Megatron's plan does, and nothing that no plan foresaw."""

import copy

import pytest
import torch
import torch.nn.functional as F
from ranks_in_threads import on_ranks
from torch import nn

from shardwright.errors import UsageError
from shardwright.placement import PARTIAL_SUM, WHOLE, Cut
from shardwright.torch.tensor_parallel.divide import divide, settle_gradients
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, divided, placement_of, whole

WIDTH, HEADS, WORDS = 32, 4, 256


class Block(nn.Module):
    """One layer of a transformer: a fused projection as GPT-2 has it, or three as Llama."""

    def __init__(self, *, fused, norm):
        super().__init__()
        self.fused = fused
        self.first, self.second = norm(WIDTH), norm(WIDTH)
        if fused:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.gate = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.first(x)
        parts = self.qkv(y).split(WIDTH, dim=2) if self.fused else (self.q(y), self.k(y), self.v(y))
        q, k, v = (each.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for each in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Language(nn.Module):
    def __init__(self, layers, **options):
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block(**options) for _ in range(layers)))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        x = self.blocks(self.table(ids))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def megatron(model, num_ranks):
    """Columns, then rows; the vocabulary."""
    found = {}
    for name, parameter in model.named_parameters():
        layer, kind = name.split(".")[-2:]
        if layer == "qkv":
            found[name] = Cut.in_segments(0, [WIDTH] * 3, num_ranks=num_ranks)
        elif layer in ("q", "k", "v", "up", "gate", "table", "head"):
            found[name] = Cut.even(0, parameter.shape[0], num_ranks=num_ranks)
        elif layer in ("out", "down") and kind == "weight":
            found[name] = Cut.even(1, parameter.shape[1], num_ranks=num_ranks)
    return found


def calls_of(layers, num_ranks, **options):
    torch.manual_seed(0)
    model = Language(layers, **options).double()
    # Long enough that sums of activations are not cheaper than the table.
    ids = torch.randint(0, WORDS, (2, 16), generator=torch.Generator().manual_seed(0))
    copies = [copy.deepcopy(model) for _ in range(num_ranks)]
    wanted = model(ids)
    wanted.backward()

    def on_rank(group):
        own = copies[group.rank]
        divide(own, megatron(own, num_ranks), group)
        loss = own(ids)
        loss.backward()
        after_backward = dict(group.traffic.calls), dict(group.traffic.sent_bytes)
        settle_gradients(own.parameters())
        held = sum(each._local.numel() if isinstance(each, DividedTensor) else 0 for each in own.parameters())
        for name, parameter in own.named_parameters():
            torch.testing.assert_close(
                whole(parameter.grad), model.get_parameter(name).grad, rtol=1e-10, atol=1e-12
            )
        torch.testing.assert_close(whole(loss), wanted.detach(), rtol=1e-12, atol=1e-12)
        assert not group.computed_whole
        return *after_backward, held

    return on_ranks(num_ranks, on_rank)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("fused", [True, False])
def test_four_all_reduces_a_layer_forward_and_backward(fused, norm, num_ranks):
    one, three = (calls_of(layers, num_ranks, fused=fused, norm=norm) for layers in (1, 3))
    for (few, few_bytes, _), (many, many_bytes, held) in zip(one, three, strict=True):
        assert set(few) == set(many) == {"all_reduce"}
        # Two layers more: four sums of the activations each, and nothing else.
        assert many["all_reduce"] - few["all_reduce"] == 2 * 4
        activations = 2 * 16 * WIDTH * 8
        assert (
            many_bytes["all_reduce"] - few_bytes["all_reduce"]
            == 2 * 4 * activations * 2 * (num_ranks - 1) // num_ranks
        )
        # Logits are not gathered: the rest is far less than they would be.
        assert (
            few_bytes["all_reduce"] - 4 * activations * 2 * (num_ranks - 1) / num_ranks < 2 * 16 * WORDS * 8
        )
        assert held == held // num_ranks * num_ranks


def test_words_that_do_not_divide_and_more_ranks_than_heads():
    """Three ranks: 4 heads as 1, 1, 2; five: one of them has none."""
    for num_ranks in (3, 5):
        torch.manual_seed(0)
        model = Language(1, fused=False, norm=nn.LayerNorm).double()
        ids = torch.randint(0, WORDS, (2, 16), generator=torch.Generator().manual_seed(0))
        copies = [copy.deepcopy(model) for _ in range(num_ranks)]
        model(ids).backward()

        def on_rank(group, num_ranks=num_ranks, copies=copies, ids=ids, model=model):
            own = copies[group.rank]
            by_heads = Cut.even(0, HEADS, num_ranks=num_ranks).times(WIDTH // HEADS)
            placements = {f"blocks.0.{name}.weight": by_heads for name in "qkv"}
            divide(
                own, {**megatron(own, num_ranks), **placements, "blocks.0.out.weight": by_heads.at(1)}, group
            )
            own(ids).backward()
            for name, parameter in own.named_parameters():
                have, want = whole(parameter.grad), model.get_parameter(name).grad
                torch.testing.assert_close(have, want, rtol=1e-10, atol=1e-12)

        on_ranks(num_ranks, on_rank)


def test_a_pending_sum_is_taken_once():
    def on_rank(group):
        x = divided(torch.ones(4, 64), Cut.even(1, 64, num_ranks=2), group)
        pending = x @ torch.ones(64, 4)
        assert placement_of(pending) == PARTIAL_SUM
        views = [pending.t(), pending.view(2, 8), pending.detach()]
        assert {placement_of(each) for each in views} == {PARTIAL_SUM}
        for each in (*views, pending):
            assert torch.equal(whole(each.exp()), torch.full(each.shape, 64.0).exp())
        assert dict(group.traffic.calls) == {"all_reduce": 1}
        pending.mul_(2)
        assert torch.equal(whole(views[0].exp()), torch.full((4, 4), 128.0).exp())
        assert group.traffic.calls["all_reduce"] == 2

    on_ranks(2, on_rank)


def test_ties_stay_and_wrong_placements_are_refused():
    def on_rank(group):
        model = nn.ModuleDict({"a": nn.Linear(4, 6), "b": nn.Linear(4, 6), "n": nn.BatchNorm1d(6)})
        model["b"].weight = model["a"].weight
        cut = Cut.even(0, 6, num_ranks=2)
        with pytest.raises(UsageError, match=r"name \['c.weight'\]"):
            divide(model, {"c.weight": cut}, group)
        with pytest.raises(UsageError, match="its runs have 6 slices, dimension 1 has 4"):
            divide(model, {"a.weight": cut.at(1)}, group)
        with pytest.raises(UsageError, match=r"are one parameter, but are placed as cut 0 .* and as whole"):
            divide(model, {"a.weight": cut, "b.weight": WHOLE}, group)
        with pytest.raises(UsageError, match="cannot be placed as a partial sum"):
            divide(model, {"a.weight": PARTIAL_SUM}, group)
        with pytest.raises(UsageError, match="names ranks that the group of 2 does not have"):
            divide(model, {"a.weight": Cut.even(0, 6, num_ranks=3)}, group)
        assert not any(isinstance(each, DividedTensor) for each in model.parameters())
        divide(model, {"b.weight": cut, "n.weight": cut, "n.running_mean": cut}, group)
        assert model["a"].weight is model["b"].weight
        assert placement_of(model["a"].weight) == cut
        assert placement_of(model["n"].running_mean) == cut
        assert model["a"].weight._local.shape == (3, 4)

    on_ranks(2, on_rank)
