"""Fake tensors: a step without data sends what the step sends, and kernels of GPUs have their rules.

The search on units whose way depends on values: experts that some token takes, checks of numbers.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from ranks_in_threads import on_ranks
from test_traffic import Language, megatron
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from model_units import units_of
from shardwright.placement import Cut
from shardwright.torch.tensor_parallel.divide import divide, settle_gradients, tensor_group
from shardwright.torch.tensor_parallel.divided_tensor import divided, placement_of, whole, wrap
from shardwright.torch.tensor_parallel.group import Prices
from shardwright.torch.tensor_parallel.search import unit as unit_module
from shardwright.torch.tensor_parallel.search.dry_run import dry_run
from shardwright.torch.tensor_parallel.search.recording import group_without_ranks
from shardwright.torch.tensor_parallel.search.search import find_placements
from shardwright.torch.tensor_parallel.search.unit import Unit
from shardwright.torch.tensor_parallel.spec import spec_of

aten = torch.ops.aten


class NoRanks:
    """Collectives that leave everything as it is."""

    def __init__(self, rank, num_ranks):
        self.rank, self.num_ranks = rank, num_ranks

    def all_reduce(self, data, operation):
        pass

    def all_gather(self, output, data):
        pass

    def all_to_all(self, output, data, receives, sends):
        pass


def step(model, ids, placements, group):
    divide(model, placements, group)
    model(ids).backward()
    settle_gradients(model.parameters())
    return dict(group.traffic.calls), dict(group.traffic.sent_bytes), dict(group.computed_whole)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_step_without_data_sends_what_the_step_sends(num_ranks):
    torch.manual_seed(0)
    model = Language(2, fused=True, norm=nn.LayerNorm)
    placements = megatron(model, num_ranks)
    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    copies = [copy.deepcopy(model) for _ in range(num_ranks)]
    sent = on_ranks(num_ranks, lambda group: step(copies[group.rank], ids, placements, group))
    for rank in range(num_ranks):
        with FakeTensorMode():
            fake = Language(2, fused=True, norm=nn.LayerNorm)
            ids_without_data = torch.empty(2, 16, dtype=torch.int64)
            group = tensor_group(NoRanks(rank, num_ranks))
            assert step(fake, ids_without_data, placements, group) == sent[rank]


def kernels(q, k, v, gradient):
    """Forward and backward of each fused attention of GPUs."""

    def flash():
        o = aten._scaled_dot_product_flash_attention.default(q, k, v)
        return o, aten._scaled_dot_product_flash_attention_backward.default(
            gradient, q, k, v, *o[:6], 0.0, False, *o[6:8]
        )

    def efficient():
        o = aten._scaled_dot_product_efficient_attention.default(q, k, v, None, True)
        return o, aten._scaled_dot_product_efficient_attention_backward.default(
            gradient, q, k, v, None, *o, 0.0, [True, True, True, False]
        )

    def cudnn():
        o = aten._scaled_dot_product_cudnn_attention.default(q, k, v, None, True)
        return o, aten._scaled_dot_product_cudnn_attention_backward.default(
            gradient, q, k, v, *o[:2], *o[6:8], None, *o[2:6], 0.0, False
        )

    def overrideable():
        o = aten._scaled_dot_product_fused_attention_overrideable.default(q, k, v)
        return o, aten._scaled_dot_product_fused_attention_overrideable_backward.default(
            gradient, q, k, v, None, [True, True, True, False], *o[:6], 0.0, False, *o[6:8]
        )

    return {"flash": flash, "efficient": efficient, "cudnn": cudnn, "overrideable": overrideable}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn", "overrideable"])
def test_attention_of_gpus_is_divided_without_communication(name, dim):
    cut = Cut.even(dim, 4, num_ranks=2)
    shape = torch.Size([4, 4, 16, 32])
    with FakeTensorMode():
        group = tensor_group(NoRanks(1, 2))

        def part():
            local = torch.empty(*shape[:dim], 2, *shape[dim + 1 :], device="cuda", dtype=torch.bfloat16)
            return wrap(local, spec_of(group, cut, local, shape=shape, strides=(2048, 512, 32, 1)))

        forward, backward = kernels(part(), part(), part(), part())[name]()
    assert [placement_of(each) for each in forward[:2]] == [cut, cut]
    assert [placement_of(each) for each in backward[:3]] == [cut, cut, cut]
    assert all(each.shape == shape for each in backward[:3])
    assert not group.traffic.calls
    assert not group.computed_whole


def test_a_dry_run_gets_no_numbers_that_nobody_has_written(monkeypatch):
    """Bug: the shorter part of an index was filled up with what lay in memory; one_hot() refused it."""
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *size: new_empty(self, *size).fill_(-77))
    group = group_without_ranks(0, 2, Prices())
    index = divided(torch.tensor([0, 3, 1, 2, 1]), Cut.of(0, [(0, 2), (1, 3)]), group)
    assert whole(index).min() >= 0


class Jacobian(nn.Module):
    """Has the diagonal of a Jacobian."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x):
        return torch.vmap(torch.func.jacrev(self.inner))(x).diagonal(dim1=1, dim2=2)


def test_gradients_of_torch_func_within_a_unit():
    """Bug: PyTorch refuses them under the hooks that count what the unit keeps."""
    unit = Unit(Jacobian(), (torch.zeros(4, 8, requires_grad=True),))
    assert dry_run(unit, {"inner.0.weight": Cut.even(0, 16, num_ranks=2)}, rank=0, num_ranks=2).traffic.calls


class Cache:
    """Keeps the values of calls, as that of a decoder does in training, too."""

    def __init__(self):
        self.values = []


class Caching(nn.Module):
    """Computes with all that its cache holds."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 16)

    def forward(self, x, cache):
        cache.values.append(self.inner(x))
        return torch.cat(cache.values)


def test_each_run_has_a_cache_of_its_own():
    """Bug: the second run took what the first had left, failed, and units with caches exchanged nothing."""
    unit = Unit(Caching(), (torch.zeros(4, 8, requires_grad=True), Cache()))
    cuts = {"inner.weight": Cut.even(0, 16, num_ranks=2)}
    first, second = (dry_run(unit, cuts, rank=0, num_ranks=2) for _ in range(2))
    assert first.kept_bytes == second.kept_bytes > 0
    assert first.traffic.calls == second.traffic.calls != {}
    assert unit.args[1].values == []


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
