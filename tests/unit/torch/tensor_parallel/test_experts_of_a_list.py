"""Experts of a list: which of them ranks share, and what code around them may do with what they give."""

import copy

import pytest
import torch
import torch.nn.functional as F
from ranks_in_threads import on_ranks
from torch import nn

from shardwright.errors import UsageError
from shardwright.placement import BetweenUnits, Cut
from shardwright.torch.tensor_parallel.boundary import Boundary
from shardwright.torch.tensor_parallel.divide import divide, settle_gradients
from shardwright.torch.tensor_parallel.divided_tensor import divided, whole
from shardwright.torch.tensor_parallel.expert_list import reasons_to_stay
from shardwright.torch.tensor_parallel.experts import cuts_of_experts, run_own_experts

WIDTH, EXPERTS, TOKENS = 6, 3, 10


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x, *, scale=1.0):
        return self.down(torch.tanh(self.up(x))) * scale


class Loop(nn.Module):
    """Routes each token to two experts, in one of many ways."""

    def __init__(self, way, experts=None):
        super().__init__()
        self.way = way
        self.experts = experts or nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.gate = nn.Linear(WIDTH, len(self.experts), bias=False)

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        return getattr(self, self.way)(x, weights, chosen)

    def adds_at_indices(self, x, weights, chosen):
        found = x.new_zeros(x.shape)
        for i in chosen.unique().tolist():
            token, place = torch.where(chosen == i)
            found.index_add_(0, token, self.experts[i](x[token]) * weights[token, place, None])
        return found

    def adds_in_place(self, x, weights, chosen):
        found = torch.zeros(x.shape, dtype=x.dtype)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(chosen == i)
            found[token] += weights[token, place].unsqueeze(-1) * expert(x.index_select(0, token), scale=0.5)
        return found

    def puts_at_masks(self, x, weights, chosen):
        rows, flat = x.repeat_interleave(2, dim=0), chosen.view(-1)
        found = torch.empty_like(rows)
        for i, expert in enumerate(self.experts):
            found[flat == i] = expert(rows[flat == i])
        return (found.view(-1, 2, WIDTH) * weights.unsqueeze(-1)).sum(1)

    def sorts(self, x, weights, chosen):
        order = chosen.view(-1).argsort()
        counts = torch.bincount(chosen.view(-1), minlength=len(self.experts)).tolist()
        rows = x[order // 2].split(counts)
        found = torch.cat([expert(each) for expert, each in zip(self.experts, rows, strict=True)])
        back = torch.zeros_like(found)
        back[order] = found
        return (back.view(-1, 2, WIDTH) * weights.unsqueeze(-1)).sum(1)

    def normalises(self, x, weights, chosen):
        """What is no sum of experts is made of the sum."""
        found = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, _ = torch.where(chosen == i)
            found = found.index_add(0, token, F.layer_norm(expert(x[token]), (WIDTH,)))
        return F.gelu(found) + x

    def all_tokens(self, x, weights, chosen):
        dense = torch.zeros(len(x), len(self.experts), dtype=x.dtype).scatter(1, chosen, weights)
        return sum(dense[:, i, None] * expert(x) for i, expert in enumerate(self.experts))


WAYS = ["adds_at_indices", "adds_in_place", "puts_at_masks", "sorts", "normalises", "all_tokens"]


def shared(model, x, num_ranks):
    """Checks a model whose experts ranks share against one process; gives what each rank sent."""
    model = model.double()
    copies = [copy.deepcopy(model) for _ in range(num_ranks)]
    x = x.double().requires_grad_()
    wanted = model(x)
    wanted.square().sum().backward()

    def on_rank(group):
        own = copies[group.rank]
        boundary = Boundary(group, BetweenUnits(num_ranks, 0, frozenset([TOKENS])))
        divide(own, cuts_of_experts(own, num_ranks=num_ranks, units=[""]), group)
        run_own_experts(own)
        given = divided(x.detach(), Cut.even(0, TOKENS, num_ranks=num_ranks), group).requires_grad_()
        found = boundary.around(own, own)(given)
        assert isinstance(found._spec.placement, Cut)
        calls = dict(group.traffic.calls)
        found.square().sum().backward()
        settle_gradients(own.parameters())
        torch.testing.assert_close(whole(found), wanted.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(whole(given.grad), x.grad, rtol=1e-10, atol=1e-10)
        for name, parameter in own.named_parameters():
            have, want = parameter.grad, model.get_parameter(name).grad
            assert (have is None) == (want is None), name
            if want is not None:
                torch.testing.assert_close(whole(have), want, rtol=1e-10, atol=1e-10)
        held = sum(each._local.numel() for name, each in own.named_parameters() if "experts" in name)
        return calls, held

    return on_ranks(num_ranks, on_rank)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_any_loop_is_exact(way, num_ranks):
    torch.manual_seed(0)
    model = Loop(way)
    found = shared(model, torch.randn(TOKENS, WIDTH), num_ranks)
    elements = sum(each.numel() for each in model.experts.parameters())
    assert sum(held for _, held in found) == elements


def test_each_operation_is_that_on_whole_tensors():
    torch.manual_seed(0)
    for way in ("adds_at_indices", "adds_in_place", "puts_at_masks"):
        shared(Loop(way), torch.randn(TOKENS, WIDTH), 2)


def reasons(model, *, num_ranks=2, units=("",)):
    return reasons_to_stay(model, num_ranks=num_ranks, units=units)


def test_each_expert_is_on_one_rank():
    cuts = cuts_of_experts(nn.Sequential(Loop("sorts")), num_ranks=2, units=["0"])
    assert str(cuts["0.experts.0.up.weight"]) == "cut 0 (r0:8)"
    assert str(cuts["0.experts.2.down.bias"]) == f"cut 0 (r1:{WIDTH})"
    assert len(cuts) == 4 * EXPERTS
    assert not any("gate" in name for name in cuts)


class Pairs(Expert):
    """Gives whole numbers, too."""

    def forward(self, x, *, scale=1.0):
        return super().forward(x), torch.ones(len(x), dtype=torch.int64, device=x.device)


class Looks(Expert):
    def forward(self, x, *, scale=1.0):
        return super().forward(x) * float(x.sum() > 0)


def listed(*experts):
    return Loop("adds_at_indices", nn.ModuleList(experts))


def test_what_stays_whole_is_told():
    shared_layer, with_buffer = Expert(), Expert()
    tied = listed(Expert(), Expert(), Expert())
    tied.experts[1].up = tied.experts[0].up = shared_layer.up
    with_buffer.register_buffer("count", torch.zeros(1))
    assert reasons(listed(Expert())) == {"experts": "it has 1, and 2 ranks share them"}
    assert "share parameters" in reasons(tied)["experts"]
    assert "buffers" in reasons(listed(Expert(), with_buffer))["experts"]
    outside = nn.Sequential(listed(Expert(), Expert()))
    units = ["0.gate", "0.experts.0", "0.experts.1"]
    assert "a unit of its own" in reasons(outside, units=units)["0.experts"]
    assert reasons(outside, units=["0"]) == {}
    assert cuts_of_experts(tied, num_ranks=2, units=[""]) == {}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Pairs, "an expert of a list gives a tensor of torch.int64"),
        (Looks, "an expert of a list does not run on tensors without data"),
    ],
)
def test_experts_that_cannot_be_elsewhere_are_refused(kind, message):
    model = listed(*(kind() for _ in range(EXPERTS)))

    def on_rank(group):
        own = copy.deepcopy(model)
        divide(own, cuts_of_experts(own, num_ranks=2, units=[""]), group)
        run_own_experts(own)
        with pytest.raises(UsageError, match=message):
            own(torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)))

    on_ranks(2, on_rank)


def test_types_under_autocast():
    """Ranks without an expert know the type of what it gives."""
    torch.manual_seed(0)
    model, x = Loop("sorts"), torch.randn(TOKENS, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(x)
    assert wanted.dtype == torch.bfloat16

    def on_rank(group):
        own = copy.deepcopy(model)
        divide(own, cuts_of_experts(own, num_ranks=2, units=[""]), group)
        run_own_experts(own)
        with torch.autocast("cpu", torch.bfloat16):
            given = own.experts[0](x), own.experts[2](x)
            found = own(x)
        assert [each.dtype for each in given] == [torch.bfloat16] * 2
        torch.testing.assert_close(whole(found), wanted, rtol=0.05, atol=0.05)
        found.sum().backward()

    on_ranks(2, on_rank)
