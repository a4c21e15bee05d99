"""Microbatches and placements stay those of the last run of a script, until a new plan is asked for.

Units are timed on random data, which not every unit takes.

The memory in use, as a run's timeline has it.

What the library takes on this machine is measured in the first run, and known in the next.
"""

import json
import logging
import os
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from stacks import train as squares
from torch import Tensor, nn
from transparency import Case, Recipe, differences_by_case
from zoo import classify, features
from zoo_modules import WIDTH, Stack

import shardwright.torch as sw
from shardwright import __version__
from shardwright.observe import RunFolder
from shardwright.observe.recorded_steps import read_recorded_steps
from shardwright.run.context import context
from shardwright.testing import run_ranks
from shardwright.torch.measuring import last_plan


def planned(width=16, **settings):
    """The number of microbatches of a run of one step, and how many numbers its plan has compared."""
    sw.init({"run_dir": "off", "profile": "estimated", **settings})
    torch.manual_seed(0)
    model = sw.DistributedModel(nn.Sequential(*(nn.Linear(width, width) for _ in range(4))))
    train = sw.step(squares)
    train(model, torch.ones(16, width))
    plan = context().plan
    if plan.tensor is not None:
        return plan.tensor.prices.bandwidth_Bps, bool(plan.tensor.cuts)
    return plan.schedule.microbatches, len({each.microbatches for each in plan.alternatives})


def test_the_number_of_microbatches_stays_until_asked(monkeypatch, tmp_path):
    """Two runs two minutes apart trained with 4 and with 2 microbatches."""
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    (first, compared), *_ = run_ranks(planned, 2)
    assert compared > 1
    (file,) = (tmp_path / "plans").rglob("*.json")
    document = json.loads(file.read_text())
    other = 8 if first != 8 else 4
    document["schedule"]["microbatches"] = other
    file.write_text(json.dumps(document))
    assert run_ranks(planned, 2)[0] == (other, 1)  # nothing else was traced

    def anew():
        return planned(plan="anew")

    assert run_ranks(anew, 2)[0][1] > 1
    file.write_text("{")
    assert run_ranks(planned, 2)[0][1] > 1


class Scaled(nn.Linear):
    """A layer with a number among its attributes."""

    scale = 1.0

    def forward(self, x):
        return self.scale * super().forward(x)


def units_of(scale=1.0, hook=False):
    """The units of a plan, and how often the model ran as a whole to find them."""
    from shardwright.torch.units import model_traces

    runs, discover = [], model_traces.discover
    model_traces.discover = lambda *args, **named: runs.append(1) or discover(*args, **named)
    sw.init({"run_dir": "off", "profile": "estimated"})
    torch.manual_seed(0)
    layers = [Scaled(16, 16) for _ in range(4)]
    layers[0].scale = scale
    if hook:
        layers[0].register_forward_hook(lambda module, given, result: 2 * result)
    model = sw.DistributedModel(nn.Sequential(*layers))
    train = sw.step(squares)
    loss = train(model, torch.ones(16, 16)).reduce_mean().item()
    return context().plan.unit_names, len(runs), loss


@pytest.mark.thorough
def test_units_are_found_once_for_a_model_of_the_same_code(monkeypatch, tmp_path):
    """A second run of a GPT spent a third of its processor time before step 1 on a run of the whole model."""
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    first = run_ranks(units_of, 2)[0]
    assert first[1] == 1
    assert run_ranks(units_of, 2) == [(first[0], 0, first[2])] * 2
    assert run_ranks(lambda: units_of(scale=2.0), 2)[0][:2] == (first[0], 1)  # another attribute
    _, again, loss = run_ranks(lambda: units_of(scale=2.0), 2)[0]
    names, with_hook, other = run_ranks(lambda: units_of(scale=2.0, hook=True), 2)[0]
    assert (names, again, with_hook) == (first[0], 0, 0)
    assert other != pytest.approx(loss, rel=0.1)  # the trace runs the hook


def test_another_run_removes_an_old_plan_while_this_one_looks_for_old_ones(monkeypatch, tmp_path):
    """It ended in FileNotFoundError, and with it the run."""
    monkeypatch.setattr(Path, "glob", lambda folder, _: [*folder.iterdir(), folder / "gone.json"])
    monkeypatch.setattr(last_plan, "_KEPT", 1)
    for number in range(3):
        last_plan._keep(tmp_path / f"{number}.json", "{}")
        os.utime(tmp_path / f"{number}.json", (number, number))
    assert [path.name for path in tmp_path.iterdir()] == ["2.json"]


def test_ranks_share_layers_as_they_did(monkeypatch, tmp_path):
    """A run that resumed had other placements than before, and other losses: a collective took longer."""
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))

    def shared():
        return planned(width=256, tensor_parallel_degree=2)

    run_ranks(shared, 2)
    (file,) = (tmp_path / "plans").rglob("*.json")
    document = json.loads(file.read_text())
    for bandwidth_Bps, divides in ((1e15, True), (1.0, False)):
        document["tensor"]["prices"] |= {"latency_s": 1e-9, "bandwidth_Bps": bandwidth_Bps}
        file.write_text(json.dumps(document))
        assert run_ranks(shared, 2) == [(bandwidth_Bps, divides)] * 2


class Whitens(nn.Module):
    """Takes a positive definite matrix for each sample, and no other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, matrix: Tensor) -> Tensor:
        return torch.linalg.cholesky(matrix) @ self.weight


class FactorsAMatrix(Stack):
    """Random matrices would be refused."""

    def __init__(self) -> None:
        super().__init__()
        self.whitens = Whitens()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        matrix = x.transpose(1, 2) @ x + torch.eye(WIDTH, dtype=x.dtype)
        return self.head(x + self.whitens(matrix).mean(1, keepdim=True))


class Said(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(recipe: Recipe, cases: dict[str, Case]) -> tuple[dict[str, str], list[str]]:
    said = Said()
    logging.getLogger("shardwright.run.profiler").addHandler(said)
    return differences_by_case(recipe, cases), said.lines


def test_a_unit_that_fails_on_random_data_is_estimated():
    recipe = Recipe(build=FactorsAMatrix, batch=features, loss=classify)
    cases = {"measured": Case(config={"microbatches": 4, "profile": "measured", "pipeline": "1f1b"})}
    (first, said), (second, nothing) = run_ranks(train, 2, recipe, cases, timeout_s=60)
    assert first == second == {}
    assert len(said) == 1
    assert said[0].startswith("whitens (Whitens) cannot be run on random data")
    assert "its cost is estimated" in said[0]
    assert not nothing  # all ranks fail alike


def calls_of_hooks(num_steps: int) -> dict[str, int]:
    """How often each hook of a model ran on this rank."""
    sw.init({"microbatches": 3, "pipeline": "1f1b", "run_dir": "off"})
    count: Counter[str] = Counter()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))

    def note(name: str) -> None:
        if not sw.is_tracing():
            count.update([name])

    model[0].register_forward_pre_hook(lambda module, given: note("before"))
    model[0][0].register_forward_hook(lambda module, given, made: note("inside"))
    model[0].register_full_backward_hook(lambda module, given, made: count.update(["backward"]))
    model[0][0].weight.register_hook(lambda gradient: count.update(["parameter"]))
    wrapped = sw.DistributedModel(model)
    train = sw.step(squares)
    generators = torch.get_rng_state()
    for _ in range(num_steps):
        train(wrapped, torch.ones(6, 64, requires_grad=True))
    assert torch.equal(torch.get_rng_state(), generators)
    return dict(count)


def test_hooks_run_as_often_as_in_a_plain_loop():
    """Those inside of units ran as often as the units were timed, too: some 250 times."""
    first, second = run_ranks(calls_of_hooks, 2, 2, timeout_s=60)
    assert first == {"before": 6, "inside": 6, "backward": 6, "parameter": 6}
    assert second == {"before": 6}  # hooks of a whole unit run on every rank


def train_divided(folder):
    settings = {"tensor_parallel_degree": 2, "microbatches": 2, "profile": "estimated", "report": False}
    sw.init({**settings, "run_dir": folder, "run_name": "run"})
    model = sw.DistributedModel(nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)))
    train_step = sw.step(squares)
    for _ in range(3):
        train_step(model, torch.ones(8, 64))
    sw.shutdown()


def test_a_rank_that_shares_layers_counts_its_own_part(tmp_path: Path) -> None:
    run_ranks(train_divided, 2, str(tmp_path))
    (step,) = read_recorded_steps(RunFolder(tmp_path / "run"))
    whole = 2 * 4 * (2 * 64 * 512 + 512 + 64)  # parameters and gradients
    (after,) = step.memory
    assert 0.49 * whole < after.state_bytes < 0.52 * whole


SETTINGS = {"run_dir": "off", "microbatches": 2, "measure_s": 0.1, "pipeline": "1f1b"}


def losses_and_costs(profile="measured", **settings):
    sw.init({**SETTINGS, "profile": profile, **settings})
    torch.manual_seed(0)
    random.seed(0)
    model = sw.DistributedModel(nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8)))
    train = sw.step(squares)
    losses = [float(train(model, torch.ones(4, 8)).reduce_mean()) for _ in range(2)]
    plan, cluster = context().plan, context().cluster
    sw.shutdown()
    return losses, plan, cluster, random.random()


def test_a_run_measures_them_and_trains_as_without(monkeypatch, tmp_path):
    """Toys run in the middle of its first step, on its own ranks; they leave nothing behind."""
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    plain, _, fixed, drawn = run_ranks(losses_and_costs, 2, "estimated", plan="anew")[0]
    assert fixed.host_costs is None
    losses, plan, cluster, again = run_ranks(losses_and_costs, 2, plan="anew")[0]
    assert losses == plain
    assert again == drawn
    costs = cluster.host_costs
    assert 0 < costs.step_s + costs.action_s < 0.5
    assert cluster.loop_costs.step_s + cluster.loop_costs.action_s > 0
    assert plan.prediction.conditions.action_overhead_s == costs.action_s
    assert plan.prediction.alone_s > 0
    files = {path.name.rsplit("-", 1)[1]: path for path in (tmp_path / "host").iterdir()}
    assert set(files) == {"2x1x1.json", "1x1x1.json"}
    # The next run knows them in seconds of a plain loop, and scales them by the speed of its own moment.
    known = {"step_s": 100.0, "action_s": 10.0, "unit_s": 1.0, "operation_s": 0.5}
    assert json.loads(files["2x1x1.json"].read_text())[__version__].keys() == known.keys()
    files["2x1x1.json"].write_text(json.dumps({__version__: known}))
    _, _, cluster, _ = run_ranks(losses_and_costs, 2, plan="anew")[0]
    known = cluster.host_costs
    assert 0 < known.step_s < 50
    assert known.action_s == pytest.approx(known.step_s / 10)


@pytest.mark.parametrize(
    ("degrees", "file"),
    [
        ({"pipeline_parallel_degree": 1, "data_parallel_degree": 2, "plan_one_stage": True}, "1x2x1.json"),
        ({"pipeline_parallel_degree": 2, "data_parallel_degree": 1, "pipeline": "zb_h1"}, "2x1x1.json"),
        ({"replay": "off"}, "2x1x1-off.json"),
    ],
)
def test_they_are_those_of_the_grid_of_ranks(monkeypatch, tmp_path, degrees, file):
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    run_ranks(losses_and_costs, 2, **{**SETTINGS, **degrees})
    assert any(path.name.endswith(file) for path in (tmp_path / "host").iterdir())
