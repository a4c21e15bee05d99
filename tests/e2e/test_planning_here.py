"""`shardwright profile` with real ranks: results, mistakes, exit codes."""

import os
import subprocess
import sys
import textwrap

import pytest

from fits import too_wide
from shardwright.cli import main

SHARDWRIGHT = [sys.executable, "-m", "shardwright"]

MODEL = """
    import torch
    from torch import nn

    def build():
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(6))
        return nn.Sequential(*blocks), torch.ones(8, 48), lambda y: y.square().mean()

    def build_that_fails():
        raise RuntimeError("the data are not there")

    def build_another():
        return nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 1)), torch.ones(8, 48)
"""


SCRIPT = """
    import torch
    import shardwright.torch as sw
    from model import build

    sw.init()
    model, batch, loss_of = build()
    model = sw.DistributedModel(model)
    optimizer = sw.DistributedOptimizer(torch.optim.Adam(model.parameters()))

    @sw.step
    def train(model, batch):
        loss = loss_of(model(batch))
        model.backward(loss)
        return loss

    train(model, batch)
    optimizer.step()
"""


@pytest.fixture
def shardwright(tmp_path):
    (tmp_path / "model.py").write_text(textwrap.dedent(MODEL))
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}

    def run(*words):
        command = [*SHARDWRIGHT, *words]
        return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200)

    run.folder = tmp_path
    return run


@pytest.fixture
def here(shardwright, monkeypatch, capsys):
    """Runs a command that starts no ranks in this process, which has imported torch already."""
    monkeypatch.chdir(shardwright.folder)

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            main([*words])
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return run


@pytest.fixture
def refused(here):
    def run(*words):
        code, _, err = here(*words)
        assert code == 2
        return err

    return run


def test_a_plan_from_a_profile(shardwright, here, refused):
    found = shardwright("profile", "model.py:build", "-n", "2", "-o", "profile.json")
    assert found.returncode == 0, found.stderr
    assert "Linear" in found.stdout or "Sequential" in found.stdout
    assert "plan model.py:build -n 2 --profile profile.json" in found.stderr
    assert too_wide(found.stdout, folds=True) == []
    words = ("-n", "2", "--profile", "profile.json", "--search-degrees")
    code, out, err = here("plan", "model.py:build", *words)
    assert code == 0, err
    assert "The times of the units were measured." in out
    words = ("-n", "2", "--profile", "profile.json")
    stale = refused("plan", "model.py:build_another", *words)
    assert "the profile is of a model with fingerprint" in stale
    text = (shardwright.folder / "profile.json").read_text()
    (shardwright.folder / "profile.json").write_text(text.replace('"latency_s": ', '"latency_s": -'))
    damaged = refused("plan", "model.py:build", *words)
    assert "cluster.intra_node.latency_s is -" in damaged


def test_what_cannot_be_measured_is_said_once(shardwright, refused):
    failing = shardwright("profile", "model.py:build_that_fails", "-n", "2")
    assert failing.returncode == 2
    assert failing.stderr.count("RuntimeError: the data are not there") == 1
    assert "shardwright run --plan FILE" in refused("plan", "model.py:build", "-n", "2", "--verify", "2")
