"""Measures what passes before a run trains: imports, small commands, and the way to the end of step 1.

    python benchmarks/start.py                       # all sections
    python benchmarks/start.py --only toy --check    # one; exit 1 where a target is missed
    python benchmarks/start.py --json start.json

Figures are processor time of a process and its threads; the clock stands beside it. Those of runs begin
behind the script's imports, to which `torch._dynamo` belongs, as an optimizer of PyTorch imports it; most of
our own modules come with the first name that is asked for. A first run finds nothing in the cache, a second
one what the first has left.

Section jobs has whole processes: the same script on so many ranks by our launcher, and by torchrun.

Sections: imports, toy, gpt, jobs, factory.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from check import Check
from sections import Section, parser_for, run_sections
from shardwright.text import align

_RANKS = 2
_SCRIPT = Path(__file__).with_name("start_script.py")
_COMMANDS = (["--help"], ["--version"], ["plan", "--help"], ["search", "--help"])

_USE = "import torch, shardwright.torch as sw; sw.init, sw.DistributedModel, sw.DistributedOptimizer, sw.step"

_FACTORY = """
import torch
from torch import nn

def build():
    with torch.device("meta"):
        layers = [nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True) for _ in range(80)]
        return nn.Sequential(*layers), torch.zeros(8, 128, 512)
"""


def seconds(command: list[str], *, folder: str | None = None) -> tuple[float, float]:
    """Processor time and clock of a command and of all that it starts."""
    before, begun_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used_s, time.perf_counter() - begun_s


def imports(options: argparse.Namespace) -> Section:
    """What an import adds to that of torch, and small commands."""
    rounds = 3 if options.quick else 7
    python = [sys.executable, "-c"]
    plain, ours, used = [], [], []
    for _ in range(rounds):
        plain.append(seconds([*python, "import torch"])[0])
        ours.append(seconds([*python, "import torch, shardwright.torch"])[0])
        used.append(seconds([*python, _USE])[0])
    beyond_s = statistics.median(ours) - statistics.median(plain)
    commands_s = {
        " ".join(command): statistics.median(
            seconds([sys.executable, "-m", "shardwright", *command])[0] for _ in range(rounds)
        )
        for command in _COMMANDS
    }
    slowest = max(commands_s, key=lambda command: commands_s[command])
    rows = [["", "cpu s"], ["import torch", f"{statistics.median(plain):.2f}"]]
    rows += [["shardwright.torch beyond it", f"{beyond_s:.2f}"]]
    names_s = statistics.median(used) - statistics.median(plain)
    rows += [["with the names of a training script", f"{names_s:.2f}"]]
    rows += [[f"shardwright {command}", f"{used_s:.3f}"] for command, used_s in commands_s.items()]
    checks = [
        Check(section="I", what="s of shardwright.torch beyond torch", value=beyond_s, target=0.3),
        Check(section="I", what="s of a command", value=commands_s[slowest], target=0.12, where=slowest),
    ]
    return {"Imports": rows}, checks


def toy(options: argparse.Namespace) -> Section:
    """Four layers Linear(8)."""
    return _runs("toy", "4 x Linear(8)", targets=(1.0, 1.0), rounds=1 if options.quick else 5)


def gpt(options: argparse.Namespace) -> Section:
    """A GPT of 0.9 million parameters."""
    return _runs("gpt", "GPT of 0.9 M", targets=(5.0, 1.5), rounds=1 if options.quick else 3)


def _runs(model: str, name: str, *, targets: tuple[float, float], rounds: int) -> Section:
    """First runs and those that follow them, each beyond its imports; medians of the slowest rank."""
    found: list[list[dict[str, float]]] = [[], []]
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            for of_run in found:
                of_run.append(_to_first_step(model, cache))
    rows = [["", "cpu s", "clock s", "cpu s until the step"]]
    checks = []
    for which, of_run, target_s in zip(("first run", "second run"), found, targets, strict=True):
        medians = {key: statistics.median(run[key] for run in of_run) for key in of_run[0]}
        rows.append([which, *(f"{medians[key]:.2f}" for key in ("cpu", "clock", "wrapped"))])
        checks.append(
            Check(
                section="S",
                what=f"s of processor time to the end of step 1, {name}, {which}",
                value=medians["cpu"],
                target=target_s,
            )
        )
    return {f"{name}, {_RANKS} ranks, from the imports to the end of step 1": rows}, checks


def _to_first_step(model: str, cache: str) -> dict[str, float]:
    """One run of the script: what its slowest rank took."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(_RANKS)]
    variables = {**os.environ, "SHARDWRIGHT_CACHE": cache, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, str(_SCRIPT), model, cache],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stdout)
    of_ranks = [json.loads(path.read_text()) for path in sorted(Path(cache).glob("rank*.json"))]
    return {key: max(each[key] for each in of_ranks) for key in of_ranks[0]}


def jobs(options: argparse.Namespace) -> Section:
    """Whole jobs of a step, from the command to the end of the last process."""
    rows, checks = [["", "cpu s", "clock s"]], []
    for ranks in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            ours = [sys.executable, "-m", "shardwright", "run", "-q", "--fresh", "-n", str(ranks)]
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
            found: dict[str, list[tuple[float, float]]] = {"shardwright run": [], "torchrun": []}
            for _ in range(1 if options.quick else 5):
                for name, launch in zip(found, (ours, torchrun), strict=True):
                    found[name].append(seconds([*launch, str(_SCRIPT), "toy", folder], folder=folder))
        medians = {
            name: [statistics.median(each) for each in zip(*runs, strict=True)]
            for name, runs in found.items()
        }
        rows += [
            [f"{name}, {ranks} ranks", *(f"{value:.2f}" for value in each)] for name, each in medians.items()
        ]
        ratio = medians["shardwright run"][0] / medians["torchrun"][0]
        what = f"of the processor time with torchrun, {ranks} ranks"
        checks.append(Check(section="J", what=what, value=ratio, target=1.0))
    return {"Whole jobs of one step": rows}, checks


def factory(_: argparse.Namespace) -> Section:
    """A search of degrees for 80 equal layers on the meta device."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "own.py").write_text(_FACTORY)
        command = [sys.executable, "-m", "shardwright", "search", "own.py:build", "dgx-h100", "--batch", "64"]
        used_s, clock_s = seconds(command, folder=folder)
    rows = [["", "cpu s", "clock s"], ["shardwright search own.py:build", f"{used_s:.1f}", f"{clock_s:.1f}"]]
    check = Check(section="F", what="s of processor time of a search for 80 layers", value=used_s, target=20)
    return {"80 equal layers on the meta device": rows}, [check]


def main() -> int:
    """Measures, prints, and writes what is asked for; returns the exit status."""
    sections = {"imports": imports, "toy": toy, "gpt": gpt, "jobs": jobs, "factory": factory}
    parser = parser_for(__doc__, quick="each once, imports three times")
    parser.add_argument("--only", help="one section", choices=list(sections))
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed library is compiled once, not in each run
    return run_sections(parser.parse_args(), sections, shown=align)


if __name__ == "__main__":
    sys.exit(main())
