"""What `make demo` runs: the example over two processes, checked against one process.

    python examples/demo.py [--steps 120]

1. trains examples/train_gpt.py over two processes, split as the library chooses;
2. repeats the first ten steps in one process, with the same microbatches: every loss must agree within 1e-4;
3. prints what came out. The loss must be clearly below the unigram entropy of the text.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from shardwright.observe import format_summary, summarize

EXAMPLE = Path(__file__).with_name("train_gpt.py")
COMPARED_STEPS, TOLERANCE = 10, 1e-4


def run(command: list[str], **environ: str) -> str:
    """Runs a command, shows its progress, and returns what it printed as its result."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"demo failed: {' '.join(command)} ended with {done.returncode}")
    return done.stdout


def metrics(folder: Path) -> list[dict[str, float]]:
    """One record a step."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    """Trains, compares, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--run-dir", default="runs")
    options = parser.parse_args()
    name = time.strftime("demo-%Y-%m-%d_%H-%M-%S")
    two, one = Path(options.run_dir) / name, Path(options.run_dir) / f"{name}-one-process"

    print(f"training over two processes, {options.steps} steps ...", file=sys.stderr)
    launch = [sys.executable, *"-m shardwright run -n 2 --run-dir".split(), options.run_dir, "--name", name]
    said = run([*launch, str(EXAMPLE), "--steps", str(options.steps)])
    microbatches = json.loads((two / "plan.json").read_text())["schedule"]["microbatches"]

    print(f"the first {COMPARED_STEPS} steps again, in one process ...", file=sys.stderr)
    settings = {"microbatches": microbatches, "run_dir": options.run_dir, "run_name": one.name}
    steps = str(min(COMPARED_STEPS, options.steps))
    run([sys.executable, str(EXAMPLE), "--steps", steps], SHARDWRIGHT_SET=json.dumps(settings))

    alone, together = metrics(one), metrics(two)
    pairs = zip(together, alone, strict=False)
    apart = max(abs(a["train/loss"] - b["train/loss"]) for a, b in pairs)
    throughput = statistics.median(record["throughput/tokens(1/s)"] for record in alone[1:])
    summary = summarize(two)
    print(format_summary(summary))
    print(f"  {(summary.throughput or 0.0) / throughput:.2f} times the throughput of one process")
    print(f"  {said.strip().splitlines()[-1]}")
    print(f"  {len(alone)} steps in one process: losses within {apart:.1e} ({TOLERANCE:g} is allowed)")
    entropy = float(said.split()[-1])
    final = statistics.fmean(record["train/loss"] for record in together[-10:])
    if not apart <= TOLERANCE:
        sys.exit("demo failed: two processes and one do not train alike")
    learned = final < entropy or options.steps < 100
    if not learned or math.isnan(final):
        sys.exit(f"demo failed: the loss {final:.3f} did not fall below the unigram entropy {entropy:.3f}")


if __name__ == "__main__":
    main()
