"""Measures tensor parallelism side by side with torch's parallelize_module and transformers' tp_plan.

    python benchmarks/tensor_parallel.py
    python benchmarks/tensor_parallel.py --ranks 2 --rounds 5 --only speed
    python benchmarks/tensor_parallel.py --quick            # does it still run?

A  seconds of a step, update included, of a Llama and a GPT-NeoX of width 512, all contenders in turns
B  bytes on the wire against those of the plan, to the byte; collectives of a layer
C  memory: what a rank keeps against the sum of its parts
D  microseconds of an operation on a divided tensor above plain PyTorch

Whether it is exact is a test: python -m pytest -m sweep tests/ranks/models/test_architectures.py -k share.
One thread a rank. `tensor_parallel_ranks.py` has the contenders.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONWARNINGS"] = "ignore"

from check import Check
from sections import Section, parser_for, run_sections
from shardwright.quantities import format_bytes, format_seconds
from shardwright.text import align

_SCRIPT = str(Path(__file__).with_name("tensor_parallel_ranks.py"))
_MODELS = ("llama", "gpt_neox")
_PEERS = ("torch", "hf")
_LAYERS = 4
_SAME_LOSS = 1e-3
_OF_A_LAYER = 4.0

_RACES: dict[tuple[str, int], dict[str, Any]] = {}


def main() -> int:
    """Runs what is asked for."""
    return run_sections(_options(), _SECTIONS, shown=align, more=_races)


def _races() -> dict[str, Any]:
    return {"races": {f"{model}, {ranks} ranks": race for (model, ranks), race in _RACES.items()}}


def _race(options: argparse.Namespace, model: str, ranks: int) -> dict[str, Any]:
    """All contenders on one model; once for all sections."""
    if (model, ranks) not in _RACES:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "figures.json")
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--local-addr=127.0.0.1",
            ]
            arguments = ["--kinds", *options.kinds, "--model", model, "--rounds", str(options.rounds)]
            subprocess.run(
                [*command, f"--nproc-per-node={ranks}", _SCRIPT, *arguments, "--out", str(out)],
                check=True,
                stderr=None if options.loud else subprocess.DEVNULL,
            )
            found = json.loads(out.read_text())
        _check_losses(found["losses"])
        _RACES[model, ranks] = found
    return _RACES[model, ranks]


def _check_losses(losses: dict[str, list[float]]) -> None:
    """Refuses to compare the speed of different work."""
    first = next(iter(losses.values()))
    for kind, values in losses.items():
        if any(abs(a - b) > _SAME_LOSS * abs(b) for a, b in zip(values, first, strict=True)):
            raise RuntimeError(f"{kind} has other losses than the rest: {losses}")


# ---- A: seconds ----


def _speed(options: argparse.Namespace) -> Section:
    rows = [["model", "ranks", "contender", "a step", "+-", "ours / it", "predicted", "of a core"]]
    checks = []
    for model in _MODELS:
        for ranks in options.ranks:
            race = _race(options, model, ranks)
            times, facts = race["seconds"], race["facts"][0]
            for kind, values in times.items():
                ratio = _ratio(times, options.ours, kind)
                predicted = facts[kind].get("predicted seconds")
                rows.append(
                    [
                        *(model, str(ranks), kind, format_seconds(statistics.median(values))),
                        format_seconds(_spread(values)),
                        f"{ratio:.3f}",
                        "-" if predicted is None else format_seconds(predicted),
                        format_seconds(facts[kind]["core seconds"]),
                    ]
                )
                if kind in _PEERS:
                    what = f"{model}, {ranks} ranks: {options.ours} / {kind}"
                    checks.append(Check(section="A", what=what, value=ratio, target=1.0))
    return {"seconds of a step": rows, "where our step goes, measured / predicted": _parts(options)}, checks


def _parts(options: argparse.Namespace) -> list[list[str]]:
    """What a rank exchanges and updates, and the rest of its step."""
    rows = [["model", "ranks", "rank", "compute", "exchange, with waiting", "update"]]
    for model in _MODELS:
        for ranks in options.ranks:
            for rank, facts in enumerate(_race(options, model, ranks)["facts"]):
                own = facts.get("ours", {})
                if "exchange seconds" not in own or "predicted seconds" not in own:
                    continue
                exchange, update = own["predicted exchange"], own["predicted update"]
                pairs = (
                    (
                        own["pass seconds"] - own["exchange seconds"],
                        own["predicted seconds"] - exchange - update,
                    ),
                    (own["exchange seconds"], exchange),
                    (own["update seconds"], update),
                )
                shown = [" / ".join(map(format_seconds, pair)) for pair in pairs]
                rows.append([model, str(ranks), str(rank), *shown])
    return rows


def _ratio(times: dict[str, list[float]], ours: str, peer: str) -> float:
    """Median over rounds."""
    return statistics.median(a / b for a, b in zip(times[ours], times[peer], strict=True))


def _spread(values: list[float]) -> float:
    quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return (quartiles[2] - quartiles[0]) / 2


# ---- B: bytes ----


def _bytes(options: argparse.Namespace) -> Section:
    rows = [["model", "ranks", "rank", "sent", "planned", "collectives", "of a layer"]]
    checks = []
    for model in _MODELS:
        for ranks in options.ranks:
            apart = most = 0.0
            for rank, facts in enumerate(_race(options, model, ranks)["facts"]):
                own, of_layer = facts["ours"], facts["parts"]["planned calls of a layer"]
                sent, planned = own["sent bytes"], own["planned bytes"]
                apart, most = max(apart, abs(sent - planned) / planned), max(most, of_layer)
                figures = format_bytes(sent), format_bytes(planned), str(own["calls"]), str(of_layer)
                rows.append([model, str(ranks), str(rank), *figures])
            what = f"{model}, {ranks} ranks: bytes on the wire apart from the plan's"
            checks.append(Check(section="B", what=what, value=apart, target=0.0))
            what = f"{model}, {ranks} ranks: collectives of a layer, forward and backward"
            checks.append(Check(section="B", what=what, value=most, target=_OF_A_LAYER))
    return {"bytes of a step": rows}, checks


# ---- C: memory ----


def _memory(options: argparse.Namespace) -> Section:
    rows = [["model", "ranks", "rank", "kept", "sum of its parts", "torch", "hf"]]
    checks = []
    for model in _MODELS:
        for ranks in options.ranks:
            worst = 0.0
            for rank, facts in enumerate(_race(options, model, ranks)["facts"]):
                own = facts["parts"]
                worst = max(worst, own["kept bytes"] / own["bytes of parts"])
                peers = [format_bytes(facts[k]["kept bytes"]) if k in facts else "-" for k in _PEERS]
                kept = [format_bytes(own[key]) for key in ("kept bytes", "bytes of parts")]
                rows.append([model, str(ranks), str(rank), *kept, *peers])
            what = f"{model}, {ranks} ranks: kept / sum of its parts"
            checks.append(Check(section="C", what=what, value=worst, target=1.03))
    return {"parameters, gradients and updates of a rank": rows}, checks


# ---- D: an operation ----


def _dispatch(options: argparse.Namespace) -> Section:
    from tensor_dispatch import LIMIT_US, measure

    found = measure()
    rows = [["us an operation", "forward", "and backward", "forward between products"]]
    rows += [[name, *(f"{value:.1f}" for value in each.values())] for name, each in found.items()]
    above = found["divided tensor"]["forward_us"] - found["plain"]["forward_us"]
    return {"dispatch": rows}, [
        Check(section="D", what="us of a divided tensor above plain PyTorch", value=above, target=LIMIT_US)
    ]


_SECTIONS: dict[str, Callable[[argparse.Namespace], Section]] = {
    "speed": _speed,
    "bytes": _bytes,
    "memory": _memory,
    "dispatch": _dispatch,
}


def _options() -> argparse.Namespace:
    parser = parser_for(__doc__, quick="one round, two ranks")
    parser.add_argument("--only", choices=_SECTIONS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kinds", nargs="+", default=["torch", "hf", "parts", "ours"])
    parser.add_argument("--ours", default="ours", help="which of them is compared with the others")
    parser.add_argument("--loud", action="store_true", help="show what ranks write")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.ranks = 1, [2]
    return options


if __name__ == "__main__":
    sys.exit(main())
