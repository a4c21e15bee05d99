"""A training step of the demo by two versions of the library: what the newer one does more in each step.

    git worktree add /tmp/before COMMIT
    OMP_NUM_THREADS=1 python benchmarks/two_trees.py --other /tmp/before [--rounds 60] [--steps 4]

::

    round 0    other  this          each turn: some steps of examples/train_gpt.py on two ranks, the
    round 1    this   other         optimizer's included; the ranks of the other version wait meanwhile

Both follow one plan, which the other version makes. Each round gives one ratio. Wall time depends on what
else runs on the machine; processor time hardly does, as ranks that wait for one another do not compute.
"""

import argparse
import math
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
RANKS, WARM_UP_STEPS = 2, 4
Turn = tuple[float, float]
"""Seconds of a step, and of them the processor time of all ranks."""


def trained(settings: dict[str, Any]) -> Callable[[], None]:
    """A step of the demo, with the settings and the model of its script."""
    sys.path.insert(0, str(ROOT / "examples"))
    import shardwright.torch as sw
    from train_gpt import build

    sw.init({"log_interval": 10, "trace": True, **settings})
    torch.manual_seed(0)
    model, batch = build()
    model = sw.DistributedModel(model)
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    generator = torch.Generator().manual_seed(sw.dp_rank())

    @sw.step
    def train_step(model, ids):
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    def step() -> None:
        ids = torch.randint(4096, batch["input_ids"].shape, generator=generator)
        optimizer.zero_grad(set_to_none=True)
        train_step(model, ids).reduce_mean()
        optimizer.step()

    return step


def on_rank(folder: str, settings: dict[str, Any], steps: int) -> None:
    """Takes its turns: a line in its pipe begins one, the other pipe gets what it took."""
    rank = int(os.environ["RANK"])
    step = trained(settings)
    for _ in range(WARM_UP_STEPS):
        step()
    with open(f"{folder}/go{rank}") as go, open(f"{folder}/done{rank}", "w", buffering=1) as done:
        print("ready", file=done)
        while go.readline() == "go\n":
            begin_s, worked_s = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step()
            print(
                (time.perf_counter() - begin_s) / steps, (time.process_time() - worked_s) / steps, file=done
            )


class Side:
    """The ranks of one version.

    Args:
        tree: a checkout.
        folder: for its pipes and its run.
        steps: in a turn.
        plan: to follow; None makes one.
    """

    def __init__(self, tree: Path, folder: Path, *, steps: int, plan: Path | None):
        folder.mkdir()
        for rank in range(RANKS):
            os.mkfifo(folder / f"go{rank}")
            os.mkfifo(folder / f"done{rank}")
        path = [str(tree / "src"), str(tree / "compat" / "src"), os.environ.get("PYTHONPATH", "")]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        launch = [sys.executable, *f"-m shardwright run -n {RANKS} --run-dir".split(), str(folder / "runs")]
        script = [__file__, "--side", str(folder), "--steps", str(steps)]
        chosen = [] if plan is None else ["--plan", str(plan)]
        with open(folder / "log", "w") as log:
            self._process = subprocess.Popen(
                [*launch, "--name", "side", *chosen, *script], env=environ, stdout=log, stderr=log, cwd=folder
            )
        self.plan = folder / "runs" / "side" / "plan.json"
        # Open in both directions: opening one end would wait for ranks that may have failed.
        self._go = [open(folder / f"go{rank}", "r+b", buffering=0) for rank in range(RANKS)]  # noqa: SIM115
        self._done = [open(folder / f"done{rank}", "r+b", buffering=0) for rank in range(RANKS)]  # noqa: SIM115
        self._log = folder / "log"
        self._lines()

    def _lines(self) -> list[str]:
        """A line of each rank."""
        found = []
        for done in self._done:
            while not select.select([done], [], [], 1.0)[0]:
                if self._process.poll() is not None:
                    sys.exit(f"the ranks have ended:\n{self._log.read_text()}")
            found.append(done.readline().decode())
        return found

    def turn(self) -> Turn:
        """Some steps."""
        for go in self._go:
            go.write(b"go\n")
        rows = [tuple(map(float, line.split())) for line in self._lines()]
        return max(seconds for seconds, _ in rows), sum(worked for _, worked in rows)

    def close(self) -> None:
        """No more turns."""
        for go in self._go:
            go.write(b"end\n")
        self._process.wait()


def races(other: Side, this: Side, rounds: int) -> list[tuple[Turn, Turn]]:
    """The turns of both, the other's first in every other round."""
    found = []
    for number in range(rounds):
        if number % 2:
            mine = this.turn()
            found.append((other.turn(), mine))
        else:
            found.append((other.turn(), this.turn()))
    return found


def row(name: str, other: Sequence[float], this: Sequence[float]) -> str:
    """Medians of both, the median of the rounds' ratios with its standard error, and their quartiles."""
    ratios = [a / b - 1 for a, b in zip(this, other, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    # Of a normal distribution: the quartiles lie 1.349 deviations apart, the median's error is 1.253 of them.
    error = 1.253 * (high - low) / 1.349 / math.sqrt(len(ratios))
    ms = [statistics.median(side) * 1e3 for side in (other, this)]
    cells = (
        f"{ms[0]:.1f} ms",
        f"{ms[1]:.1f} ms",
        f"{median:+.2%} +- {error:.2%}",
        f"{low:+.2%} to {high:+.2%}",
    )
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--other", type=Path, help="a checkout of the version to compare with")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=4, help="in a turn")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        on_rank(options.side, {}, options.steps)
        return
    from machine import circumstances

    if options.other is None:
        parser.error("--other is missing: the checkout of the version to compare with")
    print(circumstances())
    with tempfile.TemporaryDirectory() as folder:
        other = Side(options.other.resolve(), Path(folder) / "other", steps=options.steps, plan=None)
        this = Side(ROOT, Path(folder) / "this", steps=options.steps, plan=other.plan)
        rounds = races(other, this, options.rounds)
        other.close()
        this.close()
    print(f"| {options.rounds} rounds of {options.steps} steps | other | this | this / other | quartiles |")
    print("| --- | --- | --- | --- | --- |")
    for name, place in (("step", 0), ("processor time of both ranks", 1)):
        print(row(name, [a[place] for a, _ in rounds], [b[place] for _, b in rounds]))


if __name__ == "__main__":
    main()
