"""Fake tensors: a step without data sends what the step sends, and kernels of GPUs have their rules."""

import copy

import pytest
import torch
from ranks_in_threads import on_ranks
from test_traffic import Language, megatron
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwright.placement import Cut
from shardwright.torch.tensor_parallel.divide import divide, settle_gradients, tensor_group
from shardwright.torch.tensor_parallel.divided_tensor import divided, placement_of, whole, wrap
from shardwright.torch.tensor_parallel.group import Prices
from shardwright.torch.tensor_parallel.search import Unit, dry_run
from shardwright.torch.tensor_parallel.search.recording import group_without_ranks
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
