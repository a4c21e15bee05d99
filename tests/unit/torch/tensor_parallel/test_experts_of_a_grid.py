"""Ranks in threads that share layers and samples, and all of them experts."""

import copy

import pytest
import torch
from ranks_in_threads import on_grid
from test_experts_of_a_list import WAYS, Expert, listed
from test_stacked_experts import WIDTH, Block
from torch import nn

from shardwright.placement import PARTIAL_SUM, BetweenUnits, Cut
from shardwright.torch.tensor_parallel import experts as exchange
from shardwright.torch.tensor_parallel.boundary import Boundary
from shardwright.torch.tensor_parallel.divide import divide, settle_gradients
from shardwright.torch.tensor_parallel.divided_tensor import local_of, whole, wrap
from shardwright.torch.tensor_parallel.expert_passages import summand
from shardwright.torch.tensor_parallel.experts import cuts_of_experts, run_own_experts
from shardwright.torch.tensor_parallel.spec import spec_of

OUTER = INNER = 2


class Layer(nn.Module):
    """Layers that two ranks share, around experts that four share."""

    def __init__(self, experts):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.block = experts

    def forward(self, x):
        y = x + self.down(torch.tanh(self.up(x)))
        return y + self.block(y)


CUTS = {
    "up.weight": Cut.even(0, 8, num_ranks=INNER),
    "up.bias": Cut.even(0, 8, num_ranks=INNER),
    "down.weight": Cut.even(1, 8, num_ranks=INNER),
}


def on_ranks_of_a_grid(model, x):
    """Checks three updates against one process; gives what each rank sent to those with other samples."""
    model = model.double()
    copies = [copy.deepcopy(model) for _ in range(OUTER * INNER)]
    x = x.double().requires_grad_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        losses.append(loss.item())
        gradients = {name: copy.copy(each.grad) for name, each in model.named_parameters()}
        optimizer.step()

    def on_rank(group):
        own = copies[group.rank * INNER + group.inner.rank]
        boundary = Boundary(group, BetweenUnits(OUTER, 0, frozenset([len(x)]), INNER))
        divide(own, CUTS, group.of_parameter(is_of_expert=False))
        cuts = cuts_of_experts(own, num_ranks=OUTER * INNER, units=[""])
        divide(own, cuts, group.of_parameter(is_of_expert=True))
        run_own_experts(own)
        given = boundary.placed(x.detach()).requires_grad_()
        own_optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2, foreach=True)
        for wanted in losses:
            own_optimizer.zero_grad()
            loss = boundary.around(own, own)(given).square().sum()
            loss.backward()
            settle_gradients(own.parameters())
            assert whole(loss).item() == pytest.approx(wanted, rel=1e-10)
            own_optimizer.step()
        for name, wanted in gradients.items():
            found = own.get_parameter(name).grad
            assert (found is None) == (wanted is None)
            if wanted is not None:
                torch.testing.assert_close(whole(found), wanted, rtol=1e-10, atol=1e-10)
        for name, parameter in own.named_parameters():
            torch.testing.assert_close(whole(parameter), model.get_parameter(name), rtol=1e-10, atol=1e-10)
        return group.traffic, sum(local_of(each).numel() for each in own.parameters())

    return on_grid(OUTER, INNER, on_rank)


@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_share_listed_experts(way):
    torch.manual_seed(0)
    model = Layer(listed(*(Expert() for _ in range(5))))
    model.block.way = way
    held = [elements for _, elements in on_ranks_of_a_grid(model, torch.randn(13, WIDTH))]
    of_experts = sum(each.numel() for each in model.block.experts.parameters())
    # Each has all that is neither an expert's nor cut, and a half of what two ranks share.
    beside = sum(each.numel() for each in model.parameters()) - of_experts
    cut = sum(model.get_parameter(name).numel() for name in CUTS)
    assert sum(held) == of_experts + OUTER * INNER * (beside - cut) + OUTER * cut


@pytest.mark.parametrize("most", [0.0, 1.0])
@pytest.mark.parametrize("taken", [1, 2])
def test_all_ranks_share_stacked_experts(taken, most, monkeypatch):
    """Tokens are gathered, or exchanged, among ranks with other ones."""
    monkeypatch.setattr(exchange, "MOST_SHARE", most)
    torch.manual_seed(0)
    for traffic, _ in on_ranks_of_a_grid(Layer(Block(5, taken)), torch.randn(13, WIDTH)):
        assert bool(traffic.calls["all_to_all"]) is (most == 1.0)


def test_a_sum_of_fewer_ranks_is_added_to_one_of_all():
    """It is a gradient, say, that tensor ranks have still to add up, and all expert ranks have alike."""

    def on_rank(group):
        group.experts.route_tokens()
        inner = group.inner
        of_all = summand(torch.full([3, 4], 2.0 ** (group.rank * INNER + inner.rank)), group.experts)
        own = torch.full([3, 4], 100.0 * (1 + inner.rank))
        of_fewer = wrap(own, spec_of(inner, PARTIAL_SUM, own, shape=own.shape, strides=own.stride()))
        return [whole(each)[0, 0].item() for each in (of_all + of_fewer, of_fewer - of_all, of_all)]

    assert on_grid(OUTER, INNER, on_rank) == [[315, 285, 15]] * (OUTER * INNER)
