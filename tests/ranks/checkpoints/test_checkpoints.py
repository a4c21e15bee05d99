"""What a run has saved, it or another one goes on from: to the last bit where the layout is the same.

Averages of the weights by the recipe of docs/script.md: saved with the run, on other degrees, too.
"""

import math
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed import GLOBAL_BATCH, SAMPLES, Dropped, training
from sharded import QUIET
from stacks import train as squares
from torch import Tensor, nn

import shardwright.torch as sw
from choices import thorough
from shardwright.testing import run_ranks

PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 4}

SAME_LAYOUT: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "one rank": ({}, 1, {}),
    "bf16": ({**PIPELINE, "bf16": True}, 2, {"dtype": torch.float32}),
    "fp16 shards": (
        {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 2, "fp16": True},
        2,
        {"dtype": torch.float32},
    ),
    "Adafactor on shards": (
        {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 2},
        2,
        {"optimizer": "Adafactor", "dtype": torch.float32},
    ),
    "SGD": ({"pipeline_parallel_degree": 1, "shard_optimizer_state": True}, 2, {"optimizer": "SGD"}),
    "updates over a part": ({"data_parallel_degree": 4, "shard_optimizer_state": 2}, 4, {}),
    "in the foreground": ({}, 1, {"asynchronous": False}),
}

EVERY_RUN = ("SGD", "updates over a part", "in the foreground")


@pytest.mark.parametrize(
    "case",
    [case if case in EVERY_RUN else thorough(case) for case in SAME_LAYOUT],
)
def test_a_resumed_run_is_the_uninterrupted_one(case: str, tmp_path: Path) -> None:
    """Dropout, a schedule, a buffer that changes, shuffled data over two epochs; saves are asynchronous."""
    settings, ranks, options = SAME_LAYOUT[case]
    options = {**options, "stages": settings.get("pipeline_parallel_degree", 1)}
    whole = run_ranks(training, ranks, settings, tmp_path / "whole", until=6, **options)
    plan = tmp_path / "whole" / "step-00000003" / "plan.json"  # planning anew may choose another one
    first_settings = {**settings, "plan": str(plan)} if plan.exists() else settings
    run_ranks(training, ranks, first_settings, tmp_path / "cut", until=3, **options)
    rest = run_ranks(training, ranks, settings, tmp_path / "cut", until=6, first=3, **options)
    for (losses, state, seen), (later, final, rest_seen) in zip(whole, rest, strict=True):
        assert all(map(math.isfinite, losses))
        assert later == losses[3:]
        assert rest_seen == seen[-len(rest_seen) :]
        assert state.keys() == final.keys()
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(final[name], value), name


def two_optimizers(folder: Path, first: int, until: int) -> tuple[list[float], dict[str, Any]]:
    """Each has half of the parameters; gradients are scaled by PyTorch's own scaler."""
    sw.init({**QUIET, **PIPELINE})
    torch.manual_seed(0)
    model = sw.DistributedModel(Dropped(dropout=0.0))
    parameters = list(model.parameters())
    groups = [{"params": parameters[0:20:2], "lr": 0.01}, {"params": parameters[20::2], "lr": 0.02}]
    updates = [
        sw.DistributedOptimizer(torch.optim.AdamW(groups if not first else groups[::-1])),
        sw.DistributedOptimizer(torch.optim.SGD(parameters[1::2], lr=1e-4, momentum=0.9)),
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2)
    checkpoints = sw.Checkpoints(folder, every=1, keep=1, state={"scaler": scaler})
    assert checkpoints.resume() == first

    @sw.step
    def train(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(scaler.scale(loss))
        return loss

    losses = []
    for step in range(first, until):
        x = torch.randint(0, 37, (8, 5), generator=torch.Generator().manual_seed(step))
        for optimizer in updates:
            optimizer.zero_grad()
        losses.append(train(model, x).reduce_mean().item())
        for optimizer in updates:
            scaler.step(optimizer)
        scaler.update()
        checkpoints.step_done(step + 1)
    checkpoints.wait()
    tensors = {name: t for name, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    return losses, {**tensors, "scale": torch.tensor(scaler.get_scale())}


@pytest.mark.thorough
def test_two_optimizers_a_scaler_and_one_checkpoint_that_stays(tmp_path: Path) -> None:
    """Groups may come in another order; older checkpoints go."""
    (whole, state), *_ = run_ranks(two_optimizers, 2, tmp_path / "whole", 0, 5)
    (path,) = (tmp_path / "whole").glob("step-*")
    assert path.name == "step-00000005"
    run_ranks(two_optimizers, 2, tmp_path / "cut", 0, 3)
    for losses, final in run_ranks(two_optimizers, 2, tmp_path / "cut", 3, 5):
        assert losses == pytest.approx(whole[3:], rel=1e-5)
        torch.testing.assert_close(final, state, rtol=1e-4, atol=1e-6)


# Pipeline, shard, replicas: from some of each kind, and to some.
@pytest.mark.parametrize(
    ("before", "after"),
    [
        thorough((1, 1, 1), (2, 2, 1)),
        ((1, 1, 2), (2, 1, 1)),
        ((2, 1, 1), (1, 2, 1)),
        ((1, 2, 2), (1, 1, 1)),
    ],
)
def test_any_layout_resumes_what_any_other_has_saved(
    before: tuple[int, int, int], after: tuple[int, int, int], tmp_path: Path
) -> None:
    """Losses are those of one rank within 1e-9, and every sample is seen once in an epoch."""
    plain = _plain_losses()
    settings, ranks = _settings(*before)
    saved = run_ranks(training, ranks, settings, tmp_path, until=3, dropout=0.0)
    settings, ranks = _settings(*after)
    rest = run_ranks(training, ranks, settings, tmp_path, until=7, first=3, dropout=0.0)
    assert saved[0][0] == pytest.approx(plain[:3], rel=1e-9)
    for losses, _, _ in rest:
        assert losses == pytest.approx(plain[3:], rel=1e-9)
    first_epoch = _samples(saved, before, steps=3) + _samples(rest, after, steps=2)
    assert sorted(first_epoch) == list(range(SAMPLES))


@cache
def _plain_losses() -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        losses: list[float] = run_ranks(training, 1, {}, Path(folder), until=7, dropout=0.0)[0][0]
    return losses


def _settings(pipeline: int, shard: int, replicas: int) -> tuple[dict[str, Any], int]:
    settings = {
        "pipeline_parallel_degree": pipeline,
        "sharded_data_parallel_degree": shard,
        "microbatches": 2,
    }
    return settings, pipeline * shard * replicas


def _samples(results: list[Any], layout: tuple[int, int, int], *, steps: int) -> list[int]:
    """What all replicas have seen in the first steps; ranks of a pipeline see the same."""
    _, shard, replicas = layout
    of_replicas = {tuple(seen) for _, _, seen in results}
    assert len(of_replicas) == shard * replicas
    share = GLOBAL_BATCH // (shard * replicas)
    return [sample for seen in of_replicas for sample in seen[: steps * share]]


STAGES: dict[str, Any] = {"pipeline_parallel_degree": 2, "microbatches": 2}
SHARDS: dict[str, Any] = {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 2}


def trained(settings: dict[str, Any], folder: Path, until: int) -> dict[str, Tensor]:
    """The averages after so many steps, of which the folder may have some."""
    sw.init({"run_dir": "off", "profile": "estimated", **settings})
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
    model = sw.DistributedModel(nn.Sequential(*layers).double())
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    @torch.no_grad()
    def average(decay: float = 0.5) -> None:
        for p in model.local_parameters():
            optimizer.state[p].setdefault("average", p.clone()).lerp_(p, 1 - decay)

    @torch.no_grad()
    def exchange() -> None:
        for p in model.local_parameters():
            own = p.clone()
            p.copy_(optimizer.state[p]["average"])
            optimizer.state[p]["average"].copy_(own)

    train = sw.step(squares)
    checkpoints = sw.Checkpoints(folder, every=2, asynchronous=False)
    step = checkpoints.resume()
    while step < until:
        generator = torch.Generator().manual_seed(10 * step)
        optimizer.zero_grad(set_to_none=True)
        train(model, torch.randn(4, 6, generator=generator, dtype=torch.float64))
        optimizer.step()
        average()
        step += 1
        checkpoints.step_done(step)
    checkpoints.close()
    exchange()
    found: dict[str, Tensor] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sw.shutdown()
    return found


@pytest.mark.parametrize(("first", "second"), [(STAGES, SHARDS), (SHARDS, None)])
def test_they_go_on_with_other_degrees(
    first: dict[str, Any], second: dict[str, Any] | None, tmp_path: Path
) -> None:
    """The recipe kept them in a dictionary, which no checkpoint had."""
    expected = run_ranks(trained, 1, {}, tmp_path / "whole", 4)[0]
    run_ranks(trained, 2, first, tmp_path / "cut", 2)
    for found in run_ranks(trained, 1 if second is None else 2, second or {}, tmp_path / "cut", 4):
        assert found.keys() == expected.keys()
        for name in expected:
            assert torch.allclose(found[name], expected[name], atol=1e-12), name


class KeysWithSlashes(torch.optim.SGD):
    """A momentum under a name that looks like a path."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("m/v", torch.zeros_like(parameter))
                    parameter.sub_(mean.mul_(0.9).add_(parameter.grad), alpha=group["lr"])


def trained_with_slashes(config: dict[str, Any], folder: Path, steps: int) -> dict[str, Tensor]:
    sw.init({**QUIET, **config})
    torch.manual_seed(0)
    model = sw.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double())
    optimizer = sw.DistributedOptimizer(KeysWithSlashes(model.parameters(), lr=0.05))
    checkpoints, train = sw.Checkpoints(folder, every=2), sw.step(squares)
    step = checkpoints.resume()
    while step < steps:
        x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        train(model, x.chunk(sw.rdp_size())[sw.rdp_rank()])
        optimizer.step()
        step += 1
        checkpoints.step_done(step)
    checkpoints.close()
    found: dict[str, Tensor] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sw.shutdown()
    return found


def test_a_state_whose_keys_have_slashes_is_resumed(tmp_path: Path) -> None:
    """It was taken for that of a parameter of another name, and began anew without a word."""
    expected = run_ranks(trained_with_slashes, 1, {}, tmp_path / "whole", 4)[0]
    run_ranks(trained_with_slashes, 2, SHARDS, tmp_path / "cut", 2)
    found = run_ranks(trained_with_slashes, 1, {}, tmp_path / "cut", 4)[0]
    for name in expected:
        assert torch.allclose(found[name], expected[name], atol=1e-12), name
