"""A run of one stage that is planned: the same gradients, and a prediction.

An evaluation before the first step of training: the plan is for both.

During a step, a rank computes on cores of its own.

`torch.profiler` around a step shows the actions of a rank as named ranges.

The loss of a step in its metrics, where the script gives its backward another number than it returns.
"""

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from stacks import Stack, batches, start
from stacks import train as squares
from torch import Tensor, nn
from torch.autograd.profiler_util import Interval

import shardwright.torch as sw
from shardwright.run.context import context
from shardwright.testing import run_ranks


def train(settings, *, steps=2, last=16):
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))).double()
    sw.init({"run_name": "run", "plan_one_stage": True, **settings})
    model = sw.DistributedModel(model)
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = sw.step(squares)
    generator = torch.Generator().manual_seed(1 + sw.dp_rank())
    losses = []
    for number in range(1, steps + 1):
        optimizer.zero_grad(set_to_none=True)
        x = torch.randn(last if number == steps else 16, 32, generator=generator, dtype=torch.float64)
        losses.append(step(model, x).reduce_mean().item())
        optimizer.step()
    with torch.no_grad():
        state = {name: value.clone() for name, value in model.state_dict().items()}
    sw.shutdown()
    file = Path(settings["run_dir"], "run", "plan.json")
    return losses, state, json.loads(file.read_text()) if file.exists() else None


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"data_parallel_degree": 2, "sharded_data_parallel_degree": 2}, id="shared"),
        pytest.param({"microbatches": 4, "activation_checkpointing": "full"}, id="recomputed"),
    ],
)
def test_the_same_values_with_a_prediction(settings, tmp_path):
    own = {"pipeline_parallel_degree": 1, **settings}
    planned = run_ranks(train, 2, {**own, "run_dir": str(tmp_path / "planned")})
    plain = run_ranks(train, 2, {**own, "plan_one_stage": False, "run_dir": str(tmp_path / "plain")})
    for (losses, state, plan), (expected_losses, expected, none) in zip(planned, plain, strict=True):
        assert none is None
        assert losses == pytest.approx(expected_losses, rel=1e-12)
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)
        assert plan["mesh"]["pipeline"] == 1
        assert plan["mesh"]["data"] == 2
        assert plan["mesh"]["shard"] == settings.get("sharded_data_parallel_degree", 1)
        assert plan["prediction"]["step_s"] > 0
        assert plan["prediction"]["provenance"] == "measured"
        if "microbatches" in settings:
            assert plan["schedule"]["microbatches"] == 4
            assert all(stage["recompute"] == stage["units"] for stage in plan["stages"])


def test_one_rank(tmp_path):
    settings = {"pipeline": "gpipe", "microbatches": 4, "run_dir": str(tmp_path)}
    ((losses, _, plan),) = run_ranks(train, 1, settings)
    assert len(losses) == 2
    (memory,), (stage,) = plan["prediction"]["memory"], plan["prediction"]["stages"]
    assert memory["activations_bytes"] == stage["saved_bytes"]  # a microbatch at a time, as it runs
    assert plan["mesh"] == {"pipeline": 1, "data": 1, "shard": 1, "placement_strategy": "DPT"}


def test_a_timeline_predicts_the_microbatches_of_its_step(tmp_path):
    """Bug: beside two microbatches of a smaller batch stood the four of the plan."""
    settings = {"pipeline": "gpipe", "microbatches": 4, "trace": True, "run_dir": str(tmp_path)}
    run_ranks(train, 1, settings, steps=3, last=2)
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    predicted, measured = (
        [e["name"] for e in events if e["ph"] == "X" and e["tid"] == thread and e["cat"] != "wait"]
        for thread in (1, 2)
    )
    assert predicted == measured == ["0F0", "0B0", "0F1", "0B1"]


def cores_and_crowding(folder):
    """The cores of this process before the first step, and how many ranks share a core by the plan."""
    import os

    train({"run_dir": folder, "pipeline_parallel_degree": 1}, steps=1)
    plan = json.loads(Path(folder, "run", "plan.json").read_text())
    return len(os.sched_getaffinity(0)), plan["prediction"]["conditions"]["crowding"]


def test_all_cores_of_the_host_are_planned_with(tmp_path):
    (cores, crowding), _ = run_ranks(cores_and_crowding, 2, str(tmp_path))
    assert crowding == max(1.0, 2 / cores)


CONFIG = {"pipeline_parallel_degree": 2}


def evaluate_and_train(
    around: Any, *, optimizer: bool = True, insists: bool = False
) -> tuple[list[float], list[int], list[float]]:
    """What the plan predicts, and losses of an evaluation and of a step on the same batch."""
    sw, _, model = start(Stack, CONFIG)
    if optimizer:
        sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @sw.step
    def evaluate(model: nn.Module, x: Tensor) -> Tensor:
        assert not (insists and torch.is_grad_enabled())
        return model(x).square().mean()

    train = sw.step(squares)
    losses = []
    with around():
        if around is not nullcontext:
            losses.append(evaluate(model, batches(0, 1)[0]).reduce_mean().item())
    if optimizer:
        losses.append(train(model, batches(0, 1)[0]).reduce_mean().item())
    plan = context().plan
    assert plan is not None
    seconds = [stage.backward_s for stage in plan.prediction.stages]
    activations = [memory.activations_bytes for memory in plan.prediction.memory]
    return seconds, activations, losses


def test_a_plan_made_in_an_evaluation_is_for_training():
    """It said that the backward takes no time, and that nothing is kept for it."""
    ((expected, *_), _) = run_ranks(evaluate_and_train, 2, nullcontext)
    for seconds, activations, (of_evaluation, of_training) in run_ranks(evaluate_and_train, 2, torch.no_grad):
        assert sum(seconds) == pytest.approx(sum(expected), rel=0.05)
        assert all(num_bytes > 0 for num_bytes in activations)
        assert of_evaluation == pytest.approx(of_training, rel=1e-12)


def test_without_an_optimizer_the_plan_is_that_of_an_evaluation():
    ((seconds, _, _), _) = run_ranks(evaluate_and_train, 2, torch.no_grad, optimizer=False)
    assert seconds == [0.0, 0.0]


def test_code_that_insists_on_no_gradients_is_planned_without():
    ((seconds, _, (of_evaluation, of_training)), _) = run_ranks(
        evaluate_and_train, 2, torch.no_grad, insists=True
    )
    assert seconds == [0.0, 0.0]
    assert of_evaluation == pytest.approx(of_training, rel=1e-12)


def cores_of_a_step(**settings):
    sw.init({"run_dir": "off", "microbatches": 2, **settings})
    model = sw.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    seen = []

    @sw.step
    def train(model, x):
        seen.append(os.sched_getaffinity(0))
        loss = model(x).mean()
        model.backward(loss)
        return loss

    before = os.sched_getaffinity(0)
    for _ in range(2):
        train(model, torch.ones(4, 4))
    return seen[-1], before, os.sched_getaffinity(0)


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores"
)
def test_ranks_do_not_share_cores_during_a_step():
    (first, before, after), (second, _, _) = run_ranks(cores_of_a_step, 2)
    assert first
    assert second
    assert not first & second
    assert before == after
    assert first < before


@pytest.mark.thorough
def test_too_many_ranks_are_left_alone():
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if cores > 4:
        pytest.skip("more cores than ranks")
    for inside, outside, _ in run_ranks(cores_of_a_step, 4 if cores < 4 else 8, pipeline_parallel_degree=2):
        assert inside == outside


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        (1, [{"microbatch 0", "microbatch 1"}]),
        (
            2,
            [
                {"0F0", "0F1", "0SEND_F0", "0SEND_F1", "0RECV_B0", "0RECV_B1", "0B0", "0B1"},
                {"1RECV_F0", "1RECV_F1", "1F0", "1F1", "1B0", "1B1", "1SEND_B0", "1SEND_B1"},
            ],
        ),
    ],
)
def test_actions_are_ranges_of_the_profile(num_ranks: int, names: list[set[str]]) -> None:
    def run() -> tuple[list[str], bool]:
        sw.init({"microbatches": 2, "pipeline": "gpipe", "profile": "estimated", "run_dir": "off"})
        torch.manual_seed(0)
        model = sw.DistributedModel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        step = sw.step(squares)
        step(model, torch.ones(4, 8))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step(model, torch.ones(4, 8))
        events = profile.events()
        assert events is not None
        spans = [event for event in events if event.name.startswith("shardwright ")]
        work = [event for event in events if event.name == "aten::addmm"]
        inside = all(any(within(event.time_range, span.time_range) for span in spans) for event in work)
        return sorted(span.name.removeprefix("shardwright ") for span in spans), inside

    def within(inner: Interval, outer: Interval) -> bool:
        return bool(outer.start <= inner.start and inner.end <= outer.end)

    for (found, inside), expected in zip(run_ranks(run, num_ranks), names, strict=True):
        assert found == sorted(expected)
        assert inside, "all matrix products run in a range of ours"


def accumulated(runs: str, *, scales: bool) -> tuple[list[float], list[dict[str, Any]]]:
    """Two updates of two steps each, resumed from a checkpoint between them: losses, and metrics."""
    from torch import nn

    returned: list[float] = []
    for updates in (1, 2):
        torch.manual_seed(0)
        sw.init({"run_name": "run", "run_dir": runs, "microbatches": 2, "measure_s": 0.1})
        model = sw.DistributedModel(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))))
        optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        scaler = torch.amp.GradScaler("cpu", enabled=scales)

        @sw.step
        def step(model: Any, x: torch.Tensor, scaler: Any = scaler) -> torch.Tensor:
            loss = model(x * 1.0).square().mean()
            model.backward(scaler.scale(loss / 2))
            return loss

        checkpoints = sw.Checkpoints(every=1)
        for update in range(checkpoints.resume(), updates):
            optimizer.zero_grad(set_to_none=True)
            for _ in range(2):
                returned.append(step(model, torch.ones(4, 8)).reduce_mean().item())
            scaler.step(optimizer)
            scaler.update()
            checkpoints.step_done(update + 1)
        checkpoints.close()
        sw.shutdown()
    lines = Path(runs, "run", "metrics.jsonl").read_text().splitlines()
    return returned, [json.loads(line) for line in lines]


@pytest.mark.parametrize("scales", [True, False], ids=["scaled", "divided"])
def test_it_is_reported_and_steps_go_on_where_they_were(tmp_path: Path, scales: bool) -> None:
    """Bug: a pipeline reported no loss; and the second part counted from the script's steps, so that its
    metrics replaced those of the first."""
    (returned, metrics), _ = run_ranks(accumulated, 2, str(tmp_path), scales=scales)
    assert [each["step"] for each in metrics] == [1, 2, 3, 4]
    assert all(each["time/outside_units(s)"] > 0 for each in metrics)  # the product before the model
    assert all(each["memory/limit(GiB)"] > 0 for each in metrics)  # the second part looks at no machines
    assert [each["train/loss"] for each in metrics] == pytest.approx(
        [loss / 2 for loss in returned], rel=1e-4
    )
