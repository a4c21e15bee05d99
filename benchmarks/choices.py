"""What a search chooses beside what was published, both priced alike; the table of docs/topology.md.

python benchmarks/choices.py
python benchmarks/choices.py --runtime shardwright
"""

import argparse
import sys
from dataclasses import replace

from shardwright.catalogue import find_architecture
from shardwright.cluster import parse_inventory
from shardwright.planner.ways import Task, Way, search
from shardwright.planner.ways.search import widened
from shardwright.planner.ways.space import parse_pins
from shardwright.quantities import format_seconds
from shardwright.text import align

_CASES = (
    # Model, machines, samples of a step, dtype, and what was published with its source.
    ("llama3-8b", "dgx-h100", 128, "float8", "tp=1,pp=1,cp=2", "NeMo 24.07"),
    ("llama3-70b", "dgx-h100*8", 128, "float8", "tp=4,pp=4,cp=2,vp=5", "NeMo 24.07"),
    ("llama3-405b", "dgx-h100*1024", 2048, "bfloat16", "tp=8,pp=16,cp=1", "Llama team 2024, table 4"),
    ("gpt3-175b", "dgx-a100-80gb*128", 1536, "bfloat16", "tp=8,pp=16", "Narayanan et al. 2021"),
    ("gpt-neox-20b", "dgx-a100-40gb*12", 1536, "float16", "tp=2,pp=4", "Black et al. 2022"),
    ("bloom-176b", "dgx-a100-80gb*48", 2048, "bfloat16", "tp=4,pp=12", "BigScience 2022"),
    ("qwen3-235b-a22b", "dgx-h100*32", 2048, "float8", "tp=2,pp=8,vp=4,ep=16", "Megatron Bridge 25.11"),
    ("deepseek-v3", "dgx-h100*128", 8192, "float8", "tp=2,pp=8,vp=4,ep=32", "Megatron Bridge 25.09"),
)


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runtime", default="megatron", help="whose efficiencies count")
    options = parser.parse_args()
    rows = [["model, ranks, batch", "published", "step", "chosen", "step", "of all ways", "step"]]
    for model, machines, batch, dtype, layout, source in _CASES:
        task = Task(
            model=find_architecture(model),
            machines=parse_inventory(machines),
            batch=batch,
            dtype=dtype,
            runtime=options.runtime,
        )
        published = search(replace(task, pins=parse_pins([layout]))).best
        chosen = widened(replace(task, only_what_runs=True, operable=True), search).best
        ideal = search(task).best
        size = f"{model}, {task.machines.num_ranks}, {batch}"
        ways = [(published, source), (chosen, ""), (ideal, "")]
        rows.append(
            [size, *(text for way, note in ways for text in (_cell(way, note), format_seconds(way.step_s)))]
        )
    print(align(rows))
    return 0


def _cell(way: Way, note: str) -> str:
    return f"{way.title.partition(';')[0]}{f' ({note})' if note else ''}"


if __name__ == "__main__":
    sys.exit(main())
