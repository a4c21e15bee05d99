"""Training in 16 bits, with gradients and updates in 32."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded import QUIET, Net, batches, loss_of, on_hosts
from sharded import train as train_language
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.testing import run_ranks

STEPS = 4


def plain_training(dtype: torch.dtype, microbatches: int, lr: float):
    """(losses, parameters) of a loop with float32 copies."""
    torch.manual_seed(0)
    model = Net().to(dtype)
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    for p in model.parameters():
        p.grad_dtype = torch.float32
    updates = torch.optim.AdamW(masters, lr=lr)
    losses = []
    for x, y in batches(STEPS):
        model.zero_grad()
        total = 0.0
        for part_x, part_y in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
            loss = loss_of(lambda tokens: model(tokens).float(), part_x, part_y)
            (loss / microbatches).backward()
            total += loss.item() / microbatches
        losses.append(total)
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = p.grad
        updates.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
    return losses, model.state_dict()


def training(settings: dict[str, Any], lr: float = 1e-3, ranks_per_host: int = 4, **scaling: Any):
    """(losses, state, types of gradients, loss scales) of a rank."""
    on_hosts(ranks_per_host)
    sw.init({**QUIET, **settings})
    torch.manual_seed(0)
    model = sw.DistributedModel(Net())
    updates = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=lr), **scaling)
    train = sw.step(train_language)
    losses, scales, dtypes = [], [], set()
    for x, y in batches(STEPS):
        updates.zero_grad()
        own_x, own_y = x.chunk(sw.dp_size())[sw.dp_rank()], y.chunk(sw.dp_size())[sw.dp_rank()]
        loss = train(model, own_x, own_y).reduce_mean().detach().clone()
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        losses.append(loss.item())
        dtypes |= {str(p.grad.dtype) for p in model.local_parameters() if p.grad is not None}
        updates.step()
        scales.append(updates.loss_scale)
    return losses, model.state_dict(), dtypes, scales


def check(found: Any, dtype: torch.dtype, microbatches: int, *, exactly: bool, lr: float = 1e-3) -> None:
    losses, state = plain_training(dtype, microbatches, lr)
    for own_losses, own_state, dtypes, _ in found:
        assert dtypes == {"torch.float32"}
        assert own_losses == pytest.approx(losses, rel=1e-6 if exactly else 5e-3)
        for name, value in state.items():
            assert own_state[name].dtype is dtype
            if exactly:
                torch.testing.assert_close(own_state[name], value, rtol=0, atol=0)
            else:
                torch.testing.assert_close(own_state[name], value, rtol=0.05, atol=STEPS * 2 * lr)


def test_a_pipeline_in_bfloat16_is_the_plain_loop():
    settings = {"bf16": True, "microbatches": 4, "pipeline": "zb_h1"}
    check(run_ranks(training, 2, settings), torch.bfloat16, 4, exactly=False)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"sharded_data_parallel_degree": 4, "ddp_dist_backend": "gloo"}, "fp16"),
        ({"sharded_data_parallel_degree": 2, "pipeline_parallel_degree": 2, "pipeline": "zb_h1"}, "bf16"),
    ],
)
def test_replicas_in_16_bits(settings, name):
    dtype, scaling = (torch.bfloat16, {}) if name == "bf16" else (torch.float16, {"static_loss_scale": 64.0})
    settings = {**settings, name: True, "microbatches": 2}
    check(run_ranks(training, 4, settings, ranks_per_host=2, **scaling), dtype, 8, exactly=False)


def test_small_updates_are_not_lost():
    """Each is less than half of what bfloat16 can tell apart."""

    def run():
        sw.init({**QUIET, "bf16": True, "data_parallel_degree": 2})
        model = sw.DistributedModel(nn.Linear(64, 1, bias=False))
        nn.init.ones_(model.module.weight)
        updates = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4))

        @sw.step
        def train(model: Any, x: Tensor) -> Tensor:
            loss = model(x).mean()
            model.backward(loss)
            return loss

        for _ in range(200):
            updates.zero_grad()
            train(model, torch.ones(4, 64))
            updates.step()
        weights = model.state_dict()["weight"].float()
        with torch.no_grad():
            model.module.weight.fill_(2.0)  # what a script writes counts
        updates.step()
        return weights.mean().item(), model.state_dict()["weight"].float().mean().item()

    for trained, changed in run_ranks(run, 2):
        assert trained == pytest.approx(1 - 200 * 1e-4, rel=4e-3)
        assert changed == pytest.approx(2.0, rel=4e-3)


class Overflows(nn.Module):
    """Has a gradient that float16 cannot hold, where the input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def overflows(settings, **scaling):
    sw.init({**QUIET, "fp16": True, **settings})
    torch.manual_seed(0)
    model = sw.DistributedModel(Overflows())
    updates = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), **scaling)

    @sw.step
    def train(model: Any, x: Tensor, factor: float) -> Tensor:
        loss = model(x).mean() * factor
        model.backward(loss)
        return loss

    found = []
    for index in range(4):
        # One replica alone overflows, in the second step.
        factor = 1e6 if index == 1 and sw.dp_rank() == 0 else 1.0
        before = {name: value.clone() for name, value in model.state_dict().items()}
        updates.zero_grad()
        train(model, torch.ones(8, 16), factor)
        updates.step()
        after = model.state_dict()
        same = all(torch.equal(before[name], after[name]) for name in before)
        found.append((updates.overflow, same, updates.loss_scale))
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"sharded_data_parallel_degree": 2},
        {"data_parallel_degree": 2},
        {"microbatches": 2},
        {"data_parallel_degree": 1, "microbatches": 2, "pipeline": "zb_h1"},
    ],
)
def test_all_ranks_leave_out_an_update_that_overflows_on_one(settings):
    arguments = {"init_scale": 1024.0, "scale_window": 2}
    for found in run_ranks(overflows, 2, settings, dynamic_loss_args=arguments):
        assert found == [
            (False, False, 1024.0),
            (True, True, 512.0),
            (False, False, 512.0),
            (False, False, 1024.0),
        ]


@pytest.mark.parametrize("shared", [{}, {"sharded_data_parallel_degree": 2}])
def test_the_mean_of_large_gradients_in_16_bits_is_no_infinity(shared):
    """Two replicas of a model that the script had halved itself summed 40000 twice, which float16 has not."""

    def job():
        settings = {"pipeline_parallel_degree": 1, "sdp_param_persistence_threshold": 0, **shared}
        sw.init({**QUIET, **settings})
        torch.manual_seed(0)  # of some weights the loss itself is more than float16 has
        model = sw.DistributedModel(nn.Linear(1, 2, bias=False).half())

        @sw.step
        def train(model, x):
            model.backward(model(x).mean() * 2)

        train(model, torch.full((1, 1), 40000.0, dtype=torch.float16))
        gradients = (parameter.grad for parameter in model.parameters())
        return [each.max().item() for each in gradients if each is not None]

    assert run_ranks(job, 2) == [[40000.0]] * 2
