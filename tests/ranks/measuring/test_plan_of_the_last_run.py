"""Microbatches and placements stay those of the last run of a script, until a new plan is asked for."""

import json

import pytest
import torch
from torch import nn

from shardwright.testing import run_ranks


def planned(width=16, **settings):
    """The number of microbatches of a run of one step, and how many numbers its plan has compared."""
    import shardwright.torch as sw
    from shardwright.run.context import context

    sw.init({"run_dir": "off", "profile": "estimated", **settings})
    torch.manual_seed(0)
    model = sw.DistributedModel(nn.Sequential(*(nn.Linear(width, width) for _ in range(4))))

    @sw.step
    def train(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

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
    import shardwright.torch as sw
    from shardwright.run.context import context
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

    @sw.step
    def train(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

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
    assert run_ranks(lambda: units_of(scale=2.0), 2)[0][1] == 0
    assert run_ranks(lambda: units_of(scale=2.0, hook=True), 2)[0][1] == 1  # what it does shows in that run


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
