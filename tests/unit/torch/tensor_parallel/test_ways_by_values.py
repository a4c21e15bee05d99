"""The search on units whose way depends on values: experts that some token takes, checks of numbers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from ranks_in_threads import on_ranks
from torch import nn

from model_units import units_of
from shardwright.placement import Cut
from shardwright.torch.tensor_parallel.divide import divide, settle_gradients
from shardwright.torch.tensor_parallel.divided_tensor import whole
from shardwright.torch.tensor_parallel.search import Unit, dry_run, find_placements
from shardwright.torch.tensor_parallel.search import unit as unit_module

EXPERTS, WIDTH, INNER, TAKEN = 4, 16, 32, 2


class Experts(nn.Module):
    """As transformers has them, in the three ways in which it computes them."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 8)

    def forward(self, x, index, weights):
        return {"loop": self.loop, "grouped": self.grouped, "batched": self.batched}[self.way](
            x, index, weights
        )

    def loop(self, x, index, weights):
        found = torch.zeros_like(x)
        mask = F.one_hot(index, num_classes=EXPERTS).permute(2, 1, 0)
        for (expert,) in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            place, token = torch.where(mask[expert])
            gate, up = F.linear(x[token], self.gate_up[expert]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.down[expert])
            found.index_add_(0, token, y * weights[token, place, None])
        return found

    def grouped(self, x, index, weights):
        experts, order = torch.sort(index.reshape(-1))
        offsets = torch.cumsum(torch.histc(experts.float(), EXPERTS, 0, EXPERTS - 1), 0, dtype=torch.int32)
        y = F.grouped_mm(x[order // TAKEN], self.gate_up.transpose(-2, -1), offs=offsets)
        gate, up = y.chunk(2, dim=-1)
        y = F.grouped_mm(F.silu(gate) * up, self.down.transpose(-2, -1), offs=offsets)
        y = (y * weights.reshape(-1)[order, None])[torch.argsort(order)]
        return y.view(len(x), TAKEN, WIDTH).sum(1)

    def batched(self, x, index, weights):
        experts = index.reshape(-1)
        y = torch.bmm(self.gate_up[experts], x.repeat_interleave(TAKEN, 0).unsqueeze(-1)).squeeze(-1)
        gate, up = y.chunk(2, dim=-1)
        y = torch.bmm(self.down[experts], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (y * weights.reshape(-1, 1)).view(len(x), TAKEN, WIDTH).sum(1)


class Mixture(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts(way)

    def forward(self, x):
        x = x + self.down(F.relu(self.up(x)))
        scores, index = self.router(x).softmax(-1).topk(TAKEN)
        return x + self.experts(x, index, scores)


def exact(model, x, placements, num_ranks, tolerance):
    model.zero_grad()
    copies = [copy.deepcopy(model) for _ in range(num_ranks)]
    wanted = model(x)
    wanted.pow(2).sum().backward()

    def on_rank(group):
        own = copies[group.rank]
        divide(own, placements, group)
        output = own(x)
        output.pow(2).sum().backward()
        settle_gradients(own.parameters())
        torch.testing.assert_close(whole(output), wanted.detach(), rtol=tolerance, atol=tolerance)
        for name, parameter in own.named_parameters():
            have, want = whole(parameter.grad), model.get_parameter(name).grad
            torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)

    on_ranks(num_ranks, on_rank)


@pytest.mark.parametrize("way", ["loop", "grouped", "batched"])
def test_experts_are_divided(way):
    """Most parameters of a mixture are those of its experts."""
    torch.manual_seed(0)
    model = Mixture(way) if way == "grouped" else Mixture(way).double()
    x = torch.randn(24, WIDTH, dtype=model.up.weight.dtype)
    unit = Unit(model, (x.clone().requires_grad_(),))
    found = find_placements(unit, num_ranks=2)
    assert not found.kept_whole
    assert found.divided > 0.9
    cuts = found.placements["experts.gate_up"], found.placements["experts.down"]
    # The loop adds up each expert's results by itself, so that other cuts cost as little there.
    assert way == "loop" or cuts == (
        Cut.in_segments(1, [INNER] * 2, num_ranks=2),
        Cut.even(2, INNER, num_ranks=2),
    )
    exact(model, x, found.placements, 2, 1e-4 if way == "grouped" else 1e-10)


def test_a_model_with_such_units_comes_apart():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Mixture("loop"), Mixture("loop"))
    units = units_of(model, (torch.randn(24, WIDTH),), units=["1", "2"])
    found = find_placements(units, num_ranks=2)
    assert found.kind_of == {"": "", "1": "1", "2": "1"}
    assert dry_run(units["1"], found.of_unit("1"), rank=1, num_ranks=2).traffic.calls["all_reduce"] >= 4


class LooksAtMemory(nn.Linear):
    def forward(self, x):
        assert x.data_ptr()
        return super().forward(x)


def test_code_that_leaves_the_dispatcher_is_not_tried_on_random_numbers():
    """It would do there, and fail on divided tensors."""
    unit = Unit(nn.Sequential(nn.Linear(32, 64), LooksAtMemory(64, 32)), (torch.zeros(4, 32),))
    found = find_placements(unit, num_ranks=2, optimize="memory")
    assert found.placements == {}
    assert list(found.kept_whole) == [""]
    assert dry_run(unit, {}, rank=0, num_ranks=2).traffic.calls == {}


def test_the_smallest_module_is_kept_whole_where_a_unit_is_too_large_for_random_numbers(monkeypatch):
    torch.manual_seed(0)
    model = Mixture("loop").double()
    model.up, model.down = nn.Linear(WIDTH, 64 * WIDTH).double(), nn.Linear(64 * WIDTH, WIDTH).double()
    experts = sum(each.nbytes for each in model.experts.parameters())
    monkeypatch.setattr(unit_module, "_MOST_RANDOM_BYTES", experts)
    x = torch.randn(24, WIDTH, dtype=torch.float64)
    unit = Unit(model, (x.clone().requires_grad_(),))
    found = find_placements(unit, num_ranks=2)
    assert list(found.kept_whole) == ["experts"]
    assert set(found.placements) >= {"up.weight", "down.weight"}
    assert not any(name.startswith("experts") for name in found.placements)
    assert 0.5 < found.divided < 0.95
    assert dry_run(unit, found.placements, rank=0, num_ranks=2).traffic.calls["all_reduce"] >= 2
    exact(model, x, found.placements, 2, 1e-10)
