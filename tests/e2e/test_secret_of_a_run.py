"""The secret of a run reaches all ranks, and nobody else: no file of the run, no command line, no "
"manifest."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.launch.engines.kubernetes import Kubernetes
from shardwright.launch.engines.slurm import Slurm
from shardwright.launch.estimator import Estimator

SCRIPT = """
import os, sys
from pathlib import Path
folder, rank = Path(sys.argv[1]), os.environ["RANK"]
(folder / f"secret{rank}").write_text(os.environ["SHARDWRIGHT_SECRET"])
words = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if os.access(p, os.R_OK)]
secret = os.environ["SHARDWRIGHT_SECRET"].encode()
(folder / f"seen{rank}").write_text(str(any(secret in each for each in words)))
"""


def shardwright_run(*words):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SHARDWRIGHT_")}
    words = [sys.executable, "-m", "shardwright", "run", *map(str, words)]
    return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_all_ranks_get_it_and_nothing_shows_it(script, tmp_path):
    said = shardwright_run("-n", "2", "--run-dir", tmp_path / "runs", script, tmp_path)
    assert said.returncode == 0, said.stderr
    first, second = ((tmp_path / f"secret{rank}").read_text() for rank in range(2))
    assert first == second
    assert len(first) == 64
    assert [(tmp_path / f"seen{rank}").read_text() for rank in range(2)] == ["False", "False"]
    shown = [said.stdout, said.stderr]
    shown += [path.read_text(errors="replace") for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert not any(first in text for text in shown)
    again = shardwright_run("-n", "2", "--run-dir", tmp_path / "runs", script, tmp_path)
    assert again.returncode == 0
    assert (tmp_path / "secret0").read_text() != first


def test_a_dry_run_has_a_placeholder(script):
    said = shardwright_run("-n", "2", "--dry-run", "--json", script)
    assert json.loads(said.stdout)["environment"]["SHARDWRIGHT_SECRET"] == "(made at the start)"


def test_manifests_of_slurm_have_none(script):
    job = {"source_dir": script.parent, "instance_count": 2}
    slurm = Estimator(script.name, engine=Slurm(), **job).manifest()
    (line,) = [line for line in slurm.splitlines() if "export SHARDWRIGHT_SECRET" in line]
    made = subprocess.run(["bash", "-c", f"{line}; echo $SHARDWRIGHT_SECRET"], capture_output=True, text=True)
    assert len(made.stdout.strip()) == 64
    manifest = Estimator(script.name, engine=Kubernetes(image="x"), **job).manifest()
    assert re.search(r"  secret: \w{64}\n", manifest)  # kubectl gets it with the others
    assert "secretKeyRef" in manifest
    one_host = Estimator(script.name, engine=Kubernetes(image="x"), source_dir=script.parent)
    assert "Secret" not in one_host.manifest()
    assert not list(Path(script.parent).rglob("job.yaml"))
