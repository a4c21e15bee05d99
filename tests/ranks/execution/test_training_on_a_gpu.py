"""Training on ranks that share the first GPU gives what one process gives."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from sharded import QUIET, Net, batches, loss_of, optimizer_of, plain_training, sharded_training
from sharded import train as train_language
from stacks import train as squares
from torch import Tensor, nn

import one_gpu
import shardwright.torch as sw
from shardwright.comm._private import has_nccl


def on_one_gpu(function: Callable[[], Any], num_ranks: int) -> list[Any]:
    """Runs a function; ranks join by NCCL, and a single rank has the process group of the test."""
    return one_gpu.on_one_gpu(function, num_ranks, init_process_group=num_ranks == 1)


pytestmark = pytest.mark.skipif(not has_nccl(), reason="needs a GPU, and PyTorch with NCCL")

SHARDS = {"data_parallel_degree": 2, "sharded_data_parallel_degree": 2}


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (1, {"microbatches": 4}),
        (2, {"pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": "gpipe"}),
        (2, {"pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": "1f1b"}),
        (2, {"pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": "zb_v"}),
        (2, {"pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": "interleaved"}),
        (2, {"pipeline_parallel_degree": 2, "microbatches": 4, "profile": "measured"}),
        (2, {"data_parallel_degree": 2, "microbatches": 1}),
        (2, SHARDS | {"microbatches": 2}),
        (4, SHARDS | {"pipeline_parallel_degree": 2, "microbatches": 2}),
    ],
    ids=str,
)
def test_losses_norms_and_weights_are_those_of_one_process(num_ranks: int, settings: dict[str, Any]) -> None:
    losses, norms, state = plain_training(clip=0.05)
    for own, own_norms, own_state, _ in on_one_gpu(lambda: sharded_training(settings, clip=0.05), num_ranks):
        assert own == pytest.approx(losses, rel=1e-9)
        assert own_norms == pytest.approx(norms, rel=1e-9)
        assert own_state.keys() == state.keys()
        for name, value in state.items():
            assert own_state[name].is_cuda
            torch.testing.assert_close(own_state[name].cpu(), value, rtol=1e-7, atol=1e-9, msg=name)


class Dropping(nn.Module):
    """Draws masks on the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.5, self.training)
        return x


def test_masks_of_dropout_are_those_of_one_rank() -> None:
    def job(degree: int) -> list[float]:
        sw.init({**QUIET, "pipeline_parallel_degree": degree, "microbatches": 4})
        torch.manual_seed(0)
        model = sw.DistributedModel(Dropping().double())
        train = sw.step(squares)
        torch.manual_seed(3)
        x = torch.ones(8, 16, dtype=torch.float64)
        return [train(model, x).reduce_mean().item() for _ in range(3)]

    (alone,) = on_one_gpu(lambda: job(1), 1)
    for each in on_one_gpu(lambda: job(2), 2):
        assert each == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("on_nonfinite", ["ignore", "stop"])
def test_a_step_waits_for_the_gpu_once_more_than_a_plain_loop(on_nonfinite: str) -> None:
    """The look at loss and gradients reads its flag with what the step's end reads anyway."""

    def job() -> tuple[list[str], list[str]]:
        sw.init({**QUIET, "microbatches": 2, "on_nonfinite": on_nonfinite})
        model = sw.DistributedModel(Net().double())
        updates = sw.DistributedOptimizer(optimizer_of("AdamW", model))
        train = sw.step(train_language)
        plain = Net().double().cuda()
        plain_updates = optimizer_of("AdamW", plain)

        def ours(x: Tensor, y: Tensor) -> None:
            updates.zero_grad()
            train(model, x, y)
            updates.step()

        def alone(x: Tensor, y: Tensor) -> None:
            plain_updates.zero_grad()
            for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
                (loss_of(plain, part, target) / 2).backward()
            plain_updates.step()

        found: list[list[str]] = []
        for step in (alone, ours):
            for x, y in batches(4):
                places = waits_of(partial(step, x.cuda(), y.cuda()))
            found.append(places)
        return found[0], found[1]

    ((plain, ours),) = on_one_gpu(job, 1)
    assert len(ours) <= len(plain) + 1, (plain, ours)


def waits_of(call: Callable[[], None]) -> list[str]:
    """The places at which a call waits for the GPU."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        call()
        torch.cuda.set_sync_debug_mode("default")
    return [f"{each.filename}:{each.lineno}" for each in caught if "synchronizing" in str(each.message)]


def test_a_checkpoint_of_gpus_resumes_on_other_stages(tmp_path: Any) -> None:
    def job(settings: dict[str, Any], steps: range) -> list[float]:
        sw.init({**QUIET, "microbatches": 2, **settings})
        torch.manual_seed(0)
        model = sw.DistributedModel(Net().double())
        updates = sw.DistributedOptimizer(optimizer_of("AdamW", model))
        checkpoints = sw.Checkpoints(tmp_path)
        checkpoints.resume()
        train = sw.step(train_language)
        losses = []
        for index in steps:
            x, y = batches(4)[index]
            updates.zero_grad()
            losses.append(train(model, x, y).reduce_mean().item())
            updates.step()
        checkpoints.save(steps.stop, asynchronous=False)
        checkpoints.close()
        return losses

    first = on_one_gpu(lambda: job({"pipeline_parallel_degree": 2}, range(2)), 2)
    (second,) = on_one_gpu(lambda: job({}, range(2, 4)), 1)
    losses, _, _ = plain_training(steps=4)
    assert first[0] + second == pytest.approx(losses, rel=1e-9)
