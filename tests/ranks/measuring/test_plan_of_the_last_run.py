"""Microbatches and placements stay those of the last run of a script, until a new plan is asked for."""

import json

import torch
from torch import nn

from shardwright.testing import run_ranks


def planned(width=16, **settings):
    """The number of microbatches of a run of one step, and how many numbers its plan has compared."""
    import shardwright.torch as sw
    from shardwright.torch.run.context import context

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
        return planned(plan_anew=True)

    assert run_ranks(anew, 2)[0][1] > 1
    file.write_text("{")
    assert run_ranks(planned, 2)[0][1] > 1


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
