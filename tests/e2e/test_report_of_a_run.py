"""A script that never says that it is done leaves a report."""

import os
import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
    import torch
    from torch import nn
    import shardwright.torch as sw

    sw.init({"profile": "estimated"})
    torch.manual_seed(0)
    model = sw.DistributedModel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))

    @sw.step
    def step(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    for _ in range(2):
        step(model, torch.ones(4, 8))
"""


@pytest.mark.sweep
def test_a_run_that_just_ends(tmp_path):
    pytest.importorskip("plotly")
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "shardwright", "run", "-n", "2", "--name", "one", "train.py"]
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "</html>" in (tmp_path / "runs" / "one" / "report.html").read_text()
    assert not [path for path in (tmp_path / "runs").iterdir() if path.name != "one"]
