"""Runs scripts that are written for other libraries: alone, and over ranks of Shardwright."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"


def alone(script, *arguments, cwd):
    """What the script reports in one process, without Shardwright."""
    return _report([sys.executable, SCRIPTS / script, *arguments], cwd)


def over_ranks(script, *arguments, cwd, settings, num_ranks=2):
    """What the same script reports on several ranks."""
    launcher = [sys.executable, "-m", "shardwright", "run", "-q", "-n", num_ranks]
    runner = ["-m", "shardwright.integrations", SCRIPTS / script]
    return _report([*launcher, *runner, *arguments], cwd, {"profile": "estimated", **settings})


def _report(words, cwd, settings=None):
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if settings is not None:
        environ["SHARDWRIGHT_SET"] = json.dumps(settings)
    result = subprocess.run(
        list(map(str, words)), cwd=cwd, env=environ, capture_output=True, text=True, timeout=170
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    for warning in ("was traced", "goes over all"):  # once for each number of a batch; a sum of our own
        assert warning not in result.stderr
    return json.loads((cwd / "output/report.json").read_text())
