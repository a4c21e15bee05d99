"""How long the search for placements takes: a Llama of 100 layers without data, on one thread.

    python benchmarks/placement_search.py [--layers 100] [--json] [--check]

Seconds are those of the processor, so that neighbours don't count: the model is taken apart into units by one
call, each kind of unit is recorded and searched once.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import transformers

from model_units import loss_alone, units_of
from shardwright.torch.tensor_parallel.search.search import find_placements

LIMIT_S = 2.0


def measure(num_layers: int, num_ranks: int) -> dict[str, Any]:
    config = transformers.LlamaConfig(
        hidden_size=512,
        intermediate_size=1376,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=8192,
        num_hidden_layers=num_layers,
    )
    config.use_cache = False
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        ids = torch.empty(4, 128, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    names = [f"model.layers.{index}" for index in range(num_layers)]
    start = time.process_time()
    units = units_of(model, kwargs=batch, units=names, run=loss_alone)
    apart = time.process_time()
    found = find_placements(units, num_ranks=num_ranks)
    end = time.process_time()
    return {
        "num_ranks": num_ranks,
        "units_s": apart - start,
        "search_s": end - apart,
        "divided": found.divided,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--check", action="store_true", help=f"fail above {LIMIT_S} s")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = [measure(options.layers, num_ranks) for num_ranks in (2, 3, 4, 8)]
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print(f"{'ranks':>5}{'units s':>10}{'search s':>10}{'divided':>10}")
        for row in found:
            print("{num_ranks:>5}{units_s:>10.2f}{search_s:>10.2f}{divided:>10.3f}".format(**row))
    slowest = max(row["units_s"] + row["search_s"] for row in found)
    if options.check and slowest > LIMIT_S:
        raise SystemExit(f"the search took {slowest:.1f} s of the processor, more than {LIMIT_S:.0f}")


if __name__ == "__main__":
    main()
