"""Experts in stacked weights, on ranks in threads: the cases that few tokens make."""

import copy

import pytest
import torch
import torch.nn.functional as F
from ranks_in_threads import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwright.placement import BetweenUnits, Cut
from shardwright.torch.tensor_parallel import experts as exchange
from shardwright.torch.tensor_parallel.boundary import Boundary
from shardwright.torch.tensor_parallel.divide import divide, settle_gradients
from shardwright.torch.tensor_parallel.divided_tensor import divided, whole
from shardwright.torch.tensor_parallel.experts import cuts_of_experts, run_own_experts
from shardwright.torch.tensor_parallel.group import Prices, Traffic

WIDTH, INNER = 6, 5


class Stacked(nn.Module):
    """The experts of transformers 5, by its loop."""

    def __init__(self, num_experts):
        super().__init__()
        self.num_experts, self._is_expert_parallel = num_experts, False
        self.up = nn.Parameter(torch.randn(num_experts, INNER, WIDTH) / 2)
        self.down = nn.Parameter(torch.randn(num_experts, WIDTH, INNER) / 2)

    def forward(self, hidden, index, weights):
        found = torch.zeros_like(hidden)
        for expert in index.unique().tolist():
            if expert == self.num_experts:
                continue  # of another rank
            token, place = torch.where(index == expert)
            y = F.linear(torch.tanh(F.linear(hidden[token], self.up[expert])), self.down[expert])
            found.index_add_(0, token, y * weights[token, place, None])
        return found


class Block(nn.Module):
    def __init__(self, num_experts, taken):
        super().__init__()
        self.taken = taken
        self.gate = nn.Linear(WIDTH, num_experts)
        self.experts = Stacked(num_experts)

    def forward(self, x):
        weights, index = self.gate(x).softmax(-1).topk(self.taken)
        return x + self.experts(x, index, weights)


class RecomputedBlock(Block):
    """Its forward runs again in the backward, as soon as that asks for what it has kept."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def shared(model, x, num_ranks):
    """Checks a block whose experts ranks share against one process; gives what each rank sent."""
    model = model.double()
    model.zero_grad()
    copies = [copy.deepcopy(model) for _ in range(num_ranks)]
    x = x.double().requires_grad_()
    wanted = model(x)
    wanted.square().sum().backward()

    def on_rank(group):
        own = copies[group.rank]
        group.prices = Prices(latency_s=0.0, sums_wait=True)
        boundary = Boundary(group, BetweenUnits(num_ranks, 0, frozenset([len(x)])))
        divide(own, cuts_of_experts(own, num_ranks=num_ranks, units=[""]), group)
        run_own_experts(own)
        given = divided(x.detach(), Cut.even(0, len(x), num_ranks=num_ranks), group).requires_grad_()
        found = boundary.around(own, own)(given)
        found.square().sum().backward()
        traffic, group.traffic = group.traffic, Traffic()
        settle_gradients(own.parameters())
        torch.testing.assert_close(whole(found), wanted.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(whole(given.grad), x.grad, rtol=1e-10, atol=1e-10)
        for name, parameter in own.named_parameters():
            want = model.get_parameter(name).grad
            torch.testing.assert_close(whole(parameter.grad), want, rtol=1e-10, atol=1e-10)
        return traffic

    return on_ranks(num_ranks, on_rank)


@pytest.mark.parametrize("kind", [Block, RecomputedBlock])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("most", [0.0, 1.0])
def test_a_rank_whose_experts_no_token_takes(kind, num_ranks, most, monkeypatch):
    """It had no gradients, and no part in the backward of its sum, so that the others waited for it."""
    monkeypatch.setattr(exchange, "MOST_SHARE", most)
    torch.manual_seed(0)
    model = kind(4, taken=1)
    with torch.no_grad():
        model.gate.bias.copy_(torch.tensor([9.0, 0.0, 0.0, 0.0]))
    shared(model, torch.randn(5, WIDTH), num_ranks)


@pytest.mark.parametrize(("num_ranks", "taken"), [(2, 1), (3, 2), (4, 2), (4, 3)])
def test_tokens_go_to_the_ranks_of_their_experts(num_ranks, taken, monkeypatch):
    """Exact, in fewer bytes than where all tokens are gathered."""
    torch.manual_seed(0)
    model, x = Block(9, taken), torch.randn(13, WIDTH)
    exchanged = shared(model, x, num_ranks)
    monkeypatch.setattr(exchange, "MOST_SHARE", 0.0)
    gathered = shared(model, x, num_ranks)
    for short, long in zip(exchanged, gathered, strict=True):
        # Tokens, weights and routes there, results back; gradients of results there, of the others back.
        assert short.calls == {"all_gather": 1, "all_to_all": 7}
        assert long.calls["reduce_scatter"] >= 2
    bytes_sent = [sum(each.sent_bytes.total() for each in ranks) for ranks in (exchanged, gathered)]
    assert bytes_sent[0] < bytes_sent[1]


def test_shares_of_tokens():
    experts = Cut.even(0, 8, num_ranks=4)
    assert exchange.share_of_tokens(1, experts, 0) == 1 / 4
    assert exchange.share_of_tokens(2, experts, 3) == pytest.approx(1 - 6 / 8 * 5 / 7)
    assert exchange.exchange_pays(2, experts, 4)
    assert not exchange.exchange_pays(2, Cut.even(0, 4, num_ranks=2), 2)
