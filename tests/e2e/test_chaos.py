"""``shardwright run --chaos``: a run gets over faults, names each by its rank, and has each once."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch, shardwright.torch as sw
sw.init({"profile": "estimated", "report": False, "microbatches": 2, "timeout_s": 60})
model = sw.DistributedModel(torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4))))
optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
checkpoints = sw.Checkpoints(every=1)

@sw.step
def train(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

step = checkpoints.resume()
while step < 8:
    train(model, torch.ones(4, 8))
    optimizer.step()
    step += 1
    checkpoints.step_done(step)
print("steps:", step)
"""

FAULTS = """
faults:
  - {kind: exit, rank: 1, step: 3}
  - {kind: lone-collective, rank: 0, step: 6, phase: update}
"""


def run(folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    (folder / "train.py").write_text(SCRIPT)
    (folder / "faults.yaml").write_text(FAULTS)
    command = [sys.executable, "-m", "shardwright", "run", "--chaos", "faults.yaml", *options, "train.py"]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=200, check=False)


def test_a_run_gets_over_faults_and_names_them(tmp_path: Path) -> None:
    """After a restart, who had left with code 0 was not in the headline; beside step_done of sw.Checkpoints,
    a lone collective waited for the whole timeout."""
    found = run(tmp_path, "-n", "2", "--max-restarts", "3")
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("steps: 8") == 2
    assert "\nrank 1 ended early, with exit code 0: rank 0 needed it" in found.stderr
    assert "rank 0 waits in torch.distributed.all_reduce" in found.stderr
    assert "rank 1 is in a call of sw.Checkpoints" in found.stderr
    assert found.stderr.count("shardwright run: restarted") == 2
    notes = [json.loads(line) for line in (tmp_path / "runs/train/faults.jsonl").read_text().splitlines()]
    assert [(note["kind"], note["rank"], note["step"]) for note in notes] == [
        ("exit", 1, 3),
        ("lone_collective", 0, 6),
    ]


def test_a_file_for_other_ranks_is_refused_before_the_start(tmp_path: Path) -> None:
    found = run(tmp_path)
    assert found.returncode == 2
    assert "a fault is for rank 1, but the ranks are 0 to 0" in found.stderr
    assert not (tmp_path / "runs").exists()
