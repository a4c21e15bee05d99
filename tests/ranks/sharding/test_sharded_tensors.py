"""What scripts do with shared parameters between steps gives what ordinary tensors give, or is refused.

Whole gradients of shared parameters are there for a moment only.
"""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sharded import QUIET, on_hosts, sharded_training
from stacks import train as squares
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import shardwright.torch as sw
from choices import some_combinations
from shardwright.testing import RanksFailedError, run_ranks

SETTINGS = {**QUIET, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}


def kept_view(p: Tensor) -> None:
    """A view knows of what was written after it was made."""
    view = p[1:]
    p.add_(1.0)
    view.mul_(2.0)
    p.mul_(0.5)
    p.add_(view.sum())


READS: dict[str, Any] = {
    "norm": lambda p: p.norm(),
    "norm 1": lambda p: p.norm(1),
    "norm inf": lambda p: p.norm(float("inf")),
    "norms of columns": lambda p: p.norm(dim=0),
    "sum": lambda p: p.sum(),
    "sum of rows": lambda p: p.sum(1),
    "mean": lambda p: p.mean(),
    "std": lambda p: p.std(),
    "max": lambda p: p.max(),
    "argmax": lambda p: p.argmax(),
    "abs max": lambda p: p.abs().amax(),
    "item": lambda p: p.square().sum().item(),
    "flatten": lambda p: p.flatten(),
    "view": lambda p: p.view(-1)[3:7],
    "transposed": lambda p: p.t() @ p,
    "product": lambda p: torch.ones(2, p.shape[0], dtype=p.dtype) @ p,
    "rows": lambda p: p[1:3],
    "row": lambda p: p[-1],
    "masked": lambda p: p[p > 0],
    "all rows": lambda p: [row.sum() for row in p],
    "mse": lambda p: F.mse_loss(p, torch.zeros_like(p)),
    "huber": lambda p: F.huber_loss(p, torch.ones_like(p)),
    "cosine": lambda p: F.cosine_similarity(p, p + 1, dim=1),
    "allclose": lambda p: torch.allclose(p, p),
    "equal": lambda p: torch.equal(p, p.clone()),
    "where": lambda p: torch.where(p > 0, p, -p),
    "cat": lambda p: torch.cat([p, p]),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "softmax": lambda p: p.softmax(0),
    "cumsum": lambda p: p.cumsum(0),
    "sort": lambda p: p.sort(0)[0],
    "svd": lambda p: torch.linalg.svdvals(p),
    "plain": lambda p: p + torch.arange(p.numel(), dtype=p.dtype).view(p.shape),
    "broadcast": lambda p: p * torch.arange(p.shape[1], dtype=p.dtype),
    "columns": lambda p: p[:, 1:3],
    "to": lambda p: p.to(torch.float32).double(),
    "deepcopy": lambda p: copy.deepcopy(p) * 2,
    "random": lambda p: torch.randn_like(p),
}

WRITES: dict[str, Any] = {
    "mul": lambda p: p.mul_(0.5),
    "add plain": lambda p: p.add_(torch.arange(p.numel(), dtype=p.dtype).view(p.shape)),
    "copy": lambda p: p.copy_(torch.ones(p.shape, dtype=p.dtype)),
    "data": lambda p: setattr(p, "data", torch.full(p.shape, 3.0, dtype=p.dtype)),
    "data copy": lambda p: p.data.copy_(torch.ones(p.shape, dtype=p.dtype)),
    "data mul": lambda p: p.data.mul_(2.0),
    "clamp": lambda p: p.clamp_(-0.1, 0.1),
    "normal": lambda p: nn.init.normal_(p),
    "kaiming": lambda p: nn.init.kaiming_uniform_(p),
    "orthogonal": lambda p: nn.init.orthogonal_(p),
    "truncated": lambda p: nn.init.trunc_normal_(p),
    "eye": lambda p: nn.init.eye_(p),
    "zeros": lambda p: nn.init.zeros_(p),
    "masked fill": lambda p: p.masked_fill_(p > 0, 0.0),
    "masked": lambda p: p.__setitem__(p > 0, 0.0),
    "index": lambda p: p.index_fill_(0, torch.tensor([0, p.shape[0] - 1]), 7.0),
    "listed": lambda p: p.__setitem__(torch.tensor([p.shape[0] - 1]), 7.0),
    "diagonal": lambda p: p.fill_diagonal_(2.0),
    "renorm": lambda p: p.renorm_(2, 0, 0.1),
    "over columns": lambda p: p.div_(p.norm(dim=0, keepdim=True)),
    "foreach": lambda p: torch._foreach_mul_([p, torch.ones(3)], 0.5),
    "lerp": lambda p: p.lerp_(torch.zeros_like(p), 0.1),
    "addcmul": lambda p: p.addcmul_(p, p, value=0.1),
    "rows": lambda p: p.__setitem__(slice(1, 3), 1.0),
    "row": lambda p: p[0].zero_(),
    "data rows": lambda p: p.data[0].fill_(1.5),
    "columns": lambda p: p[:, 1:3].mul_(2.0),
    "pieces": lambda p: p.chunk(2)[-1].fill_(0.25),
    "transposed": lambda p: p.t().mul_(3.0),
    "view of a view": lambda p: p.view(-1)[1:].view(-1)[:2].add_(1.0),
    "kept view": lambda p: kept_view(p),
}


def plain(value: Any) -> Any:
    if isinstance(value, list):
        return [plain(item) for item in value]
    value = value.full() if hasattr(value, "full") else value
    return value.detach().clone() if isinstance(value, Tensor) else value


def same(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a.double(), b.double())
    return a == pytest.approx(b, rel=1e-12)


def start(ranks_per_host: int, rows: int):
    on_hosts(ranks_per_host)
    sw.init(SETTINGS)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, rows), nn.Linear(rows, 4)).double()
    ordinary = copy.deepcopy(module)
    model = sw.DistributedModel(module)
    train = sw.step(squares)
    x = torch.ones(2, 4, dtype=torch.float64)
    train(model, x)
    ordinary(x).square().mean().backward()
    return sw, model, ordinary, train


def differing(ranks_per_host: int, rows: int) -> list[str]:
    """Names of what differs from ordinary tensors, or leaves other parameters changed."""
    _, model, ordinary, _ = start(ranks_per_host, rows)
    found = []
    own, other = model.module[0].weight, ordinary[0].weight
    for name, read in READS.items():
        for a, b in ((own, other), (own.grad, other.grad)):
            with torch.no_grad():
                torch.manual_seed(5)
                got = plain(read(a))
                torch.manual_seed(5)
                if not same(got, plain(read(b))):
                    found.append(name)
    for name, write in WRITES.items():
        with torch.no_grad():
            torch.manual_seed(5)
            write(own)
            torch.manual_seed(5)
            write(other)
        state = model.state_dict()
        found += [f"{name}: {key}" for key, v in ordinary.state_dict().items() if not same(state[key], v)]
    return found


@pytest.mark.parametrize(("ranks_per_host", "rows"), some_combinations([1, 4], [6, 5, 1]))
def test_shared_tensors_do_what_ordinary_ones_do(ranks_per_host, rows):
    assert run_ranks(differing, 2, ranks_per_host, rows) == [[], []]


def data_of_another_shape():
    _, model, _, _ = start(4, 6)
    model.module[0].weight.data = torch.ones(2, 2)


def test_data_of_another_shape_is_refused():
    with pytest.raises(RanksFailedError, match=r"is given a tensor of shape \(2, 2\)"):
        run_ranks(data_of_another_shape, 2)


def hooked(ranks_per_host: int) -> list[bool]:
    _, model, _, train = start(ranks_per_host, 6)
    parameter = model.module[0].weight
    parameter.grad = None
    parameter.register_hook(lambda gradient: gradient * 0)
    train(model, torch.ones(2, 4, dtype=torch.float64))
    first = bool((plain(parameter.grad) == 0).all())
    train(model, torch.ones(2, 4, dtype=torch.float64))
    return [first, bool((plain(parameter.grad) == 0).all())]


@pytest.mark.parametrize("ranks_per_host", [4, 1])
def test_a_gradient_hook_registered_between_steps(ranks_per_host):
    assert run_ranks(hooked, 2, ranks_per_host) == [[True, True]] * 2


def loads_the_state_of_another_rank(settings):
    sw.init({**QUIET, **settings})
    model = sw.DistributedModel(nn.Linear(4, 4))
    updates = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

    @sw.step
    def train(model: Any, x: Tensor) -> Tensor:
        loss = model(x).mean()
        model.backward(loss)
        return loss

    train(model, torch.ones(2, 4))
    updates.step()
    updates.load_state_dict(updates.state_dict())
    updates.step()
    state = [updates.state_dict()]
    dist.broadcast_object_list(state, src=0)
    updates.load_state_dict(state[0])


@pytest.mark.parametrize(
    "settings",
    [SETTINGS, {"data_parallel_degree": 2, "shard_optimizer_state": True}, {**SETTINGS, "bf16": True}],
)
def test_the_state_of_another_rank(settings):
    with pytest.raises(RanksFailedError, match="another part of it"):
        run_ranks(loads_the_state_of_another_rank, 2, settings)


def unwrapped(settings):
    sw.init({**QUIET, **settings})
    model = sw.DistributedModel(nn.Linear(4, 4))
    torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1).step()  # of another model
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("settings", [{"bf16": True}, {"fp16": True}, {"shard_optimizer_state": True}])
def test_an_optimizer_that_is_not_wrapped(settings):
    with pytest.raises(RanksFailedError, match="SGD is not wrapped"):
        run_ranks(unwrapped, 2, {"data_parallel_degree": 2, **settings})


def module_called():
    _, model, _, _ = start(4, 6)
    with torch.no_grad():
        model(torch.ones(2, 4, dtype=torch.float64))
    model.module(torch.ones(2, 4, dtype=torch.float64))


def test_a_call_of_the_module_with_gradients():
    with pytest.raises(RanksFailedError, match="belongs inside a function decorated"):
        run_ranks(module_called, 2)


def whole_gradients_at_once(settings):
    """The most buckets whose whole gradients were there at once, and how many there were."""
    from shardwright.comm.collectives import shardwright_process_group

    held, most = [], 0

    class Watched(shardwright_process_group.TwoHopSum):
        def __init__(self, data, **more):
            nonlocal most
            held.append(StorageWeakRef(data.untyped_storage()))
            most = max(most, sum(not reference.expired() for reference in held))
            super().__init__(data, **more)

    shardwright_process_group.TwoHopSum = Watched
    sharded_training({**settings, "bucket": 500}, steps=1)
    return most, len(held)


@pytest.mark.parametrize(
    "settings",
    [{"sharded_data_parallel_degree": 2}, {"sharded_data_parallel_degree": 4, "ddp_dist_backend": "gloo"}],
)
def test_whole_gradients_are_let_go_while_the_backward_runs(settings):
    """They were kept to the end of the step, so that sharing saved no memory of gradients at the peak."""
    for most, buckets in run_ranks(whole_gradients_at_once, 4, settings):
        assert most <= 3 < buckets
