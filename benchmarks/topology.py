"""Measures how long the search for a topology takes, on one core.

python benchmarks/topology.py
python benchmarks/topology.py --quick              # once each

13 billion parameters on 64 GPUs, 100 on 4,096, 1,000 on 16,384: all degrees, schedules, microbatches,
recomputation and offload.
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

from check import Check, lines
from machine import circumstances
from shardwright.catalogue import Transformer, find_architecture
from shardwright.cluster import parse_inventory
from shardwright.planner.ways import Task, search
from shardwright.quantities import format_seconds
from shardwright.text import align

_TRILLION = Transformer(
    name="gpt-1t",
    layers=128,
    hidden=25600,
    heads=160,
    vocabulary=51200,
    sequence=2048,
    ffn=102400,
    source="Narayanan et al. 2021, arXiv:2104.04473",
)
_CASES = (
    # model, machines, samples of a step, seconds
    (find_architecture("gpt-neox-13b"), "p4d.24xlarge*8", 1024, 1.0),
    (find_architecture("gpt-neox-100b"), "p4d.24xlarge*512", 4096, 5.0),
    (_TRILLION, "dgx-h100*2048", 16384, 3.0),
    (find_architecture("llama3-405b"), "dgx-h100*512", 4096, 3.0),
    (find_architecture("deepseek-v3"), "dgx-h100*128", 8192, 3.0),
    (find_architecture("deepseek-v3"), "dgx-h100*8192", 16384, 3.0),
)


def main() -> int:
    """Runs all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--check", action="store_true", help="only the targets; exit 1 where one is missed")
    options = parser.parse_args()
    where = circumstances()
    rows = [["model", "ranks", "ways", "priced", "seconds", "best"]]
    checks, figures = [], {}
    for model, machines, batch, target in _CASES:
        task = Task(model=model, machines=parse_inventory(machines), batch=batch)
        times = []
        for _ in range(1 if options.quick else options.rounds):
            start = time.perf_counter()
            answer = search(task)
            times.append(time.perf_counter() - start)
        seconds = statistics.median(times)
        name = f"{task.model.name} on {task.machines.num_ranks} ranks"
        figures[name] = times
        checks.append(Check(section="S", what=f"{name}, seconds", value=seconds, target=target))
        counts = [str(task.machines.num_ranks), str(answer.num_ways), str(answer.num_priced)]
        rows.append([task.model.name, *counts, format_seconds(seconds), answer.best.title])
    if not options.check:
        print("\n".join(f"{key}: {value}" for key, value in where.items()))
        print(f"\n{align(rows)}\n")
    print("\n".join(lines(checks)))
    if options.json is not None:
        verdicts = [asdict(check) | {"passes": check.passes} for check in checks]
        document = {"circumstances": where, "figures": figures, "checks": verdicts}
        options.json.write_text(json.dumps(document, indent=1))
    return 1 if options.check and not all(check.passes for check in checks) else 0


if __name__ == "__main__":
    sys.exit(main())
