"""Who sleeps, or runs no Python, is named with its stack; a stopped rank, or a lone one, ends the run."""

import json
import subprocess
import sys
from pathlib import Path

from shardwright.flight_record import read_page

BEGIN = """
import time, torch, torch.distributed as dist, shardwright.torch as sw
from shardwright.testing.faults import happen
sw.init({"profile": "estimated", "report": False, "microbatches": 2, "timeout_s": 90})
model = sw.DistributedModel(torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4))))

@sw.step
def train(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

"""

SCRIPT = (
    BEGIN
    + """def load(step):
    if step == 2 and sw.rank() == 1:
        time.sleep(12)
    return torch.ones(4, 8)

for step in range(4):
    train(model, load(step))
if sw.rank() == 0:
    dist.all_reduce(torch.ones(3))
train(model, load(0))
"""
)


def test_who_sleeps_is_named_and_a_lone_collective_ends(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "shardwright", "run", "-n", "2", "train.py"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=200, check=False)
    said = found.stderr
    line = SCRIPT.splitlines().index("        time.sleep(12)") + 1
    assert f"train.py:{line} for " in said, said
    assert "rank 1 has been at " in said
    assert "rank 0 waits for it in the step function train. Its stack:" in said
    assert ", in load\n" in said
    assert found.returncode == 6, said
    assert "rank 0 waits in torch.distributed.all_reduce" in said
    assert "which waits for rank 0: rank 1 is in the step function train" in said


SILENT = (
    BEGIN.replace("90", "300")
    + """def load(step):
    if step == 2 and sw.rank() == 1:
        happen("gil", 7)
    if step == 4 and sw.rank() == 1:
        time.sleep(2); happen("stop")
    return torch.ones(4, 8)

for step in range(6):
    train(model, load(step))
"""
)


def test_who_runs_no_python_is_named_and_who_is_stopped_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SILENT)
    command = [sys.executable, "-m", "shardwright", "run", "-n", "2", "train.py"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=200, check=False)
    said = found.stderr
    lines = {text.strip().replace('"', ""): number for number, text in enumerate(SILENT.splitlines(), 1)}
    assert "rank 1 has not run Python for " in said, said
    assert "rank 0 waits. It was " in said
    assert f'train.py", line {lines["happen(gil, 7)"]} in load' in said
    assert found.returncode == 6, said
    assert "rank 1 hangs: rank 0 waited for it in vain" in said
    assert "rank 1 hangs: a signal (SIGSTOP, or the terminal's) has stopped its process" in said
    assert f"train.py:{lines['time.sleep(2); happen(stop)']} in load" in said
    assert "killed, because rank 0 found that it hangs" in said
    record = read_page((tmp_path / "runs" / "train" / "ranks" / "rank1").read_bytes())
    assert record.steps == 4
    assert (record.actions[-1].kind, record.actions[-1].microbatch) == (-1, 4)
    assert "load" in record.beat.stack


KILLED = (
    BEGIN
    + """def hook(module, inputs):
    if len(done) == 2 and sw.rank() == 1:
        happen("kill")

done = []
model.module[3].register_forward_pre_hook(hook)
for step in range(4):
    train(model, torch.ones(4, 8))
    done.append(step)
"""
)


def test_the_last_actions_of_a_killed_rank_stay(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(KILLED)
    command = [sys.executable, "-m", "shardwright", "run", "-n", "2", "train.py"]
    subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=200, check=False)
    command = [sys.executable, "-m", "shardwright", "status", "train", "--json"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=True)
    _, killed = json.loads(found.stdout)
    assert (killed["state"], killed["step"], killed["does"].split(",")[0]) == (
        "gone",
        3,
        "forward of microbatch 0 on stage 1",
    )
    actions = [action["action"] for action in killed["actions"]]
    assert "step 2 ended" in actions
    assert "backward of microbatch 1 on stage 1" in actions
