"""Measures sharded data parallelism side by side with DDP, FSDP2 and DeepSpeed, on one host and on two.

python benchmarks/sharding.py
python benchmarks/sharding.py --only one-host
python benchmarks/sharding.py --only two-hosts --links "100 Mbit/s" --rounds 5
python benchmarks/sharding.py --quick            # does it still run?

A  seconds of a step of an 11.7 M parameter GPT, all contenders in turns in one set of processes
B  bytes between hosts in a step, read from the interfaces
C  losses of 20 steps against DDP, for every degree, with and without a pipeline, 1 and 4 microbatches
D  memory: what a rank keeps, and the largest model that trains within a limit (root and a control group)

Two hosts are network namespaces of this machine (root and iproute2 are needed), with two ranks each, and
links of 100 Mbit/s, 1 Gbit/s and without a limit. DeepSpeed takes part where it is installed.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONWARNINGS"] = "ignore"

from check import Check
from sections import Figures, Section, parser_for, run_sections
from shardwright.quantities import format_bytes, format_seconds
from shardwright.testing.cluster import Cluster, missing_for_networks
from shardwright.text import align

_RATES = {"100 Mbit/s": 100e6, "1 Gbit/s": 1e9, "no limit": None}
_SCRIPT = str(Path(__file__).with_name("sharding_ranks.py"))
_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None

Times = dict[str, list[float]]
"""Seconds of a step, by contender and round."""


def main() -> int:
    """Runs what is asked for."""
    return run_sections(_options(), _SECTIONS, shown=_table)


# ---- A: seconds ----


def _one_host(options: argparse.Namespace) -> Section:
    found: Figures = {}
    checks = []
    for ranks in options.ranks:
        found[f"one host, {ranks} ranks"] = times = _on_one_host(ranks, options.rounds)
        checks += _checks_on_one_host(ranks, times)
    return found, checks


def _two_hosts(options: argparse.Namespace) -> Section:
    if (missing := missing_for_networks()) is not None:
        print(f"two hosts: not measured, {missing}")
        return {}, []
    found: Figures = {}
    checks = []
    for name in options.links:
        found[f"two hosts x 2 ranks, {name}"] = times = _on_two_hosts(_RATES[name], options.rounds)
        checks += _checks_on_two_hosts(name, times)
    return found, checks


def _on_one_host(ranks: int, rounds: int) -> Times:
    names = ["ddp", "ours-1", *(f"{kind}-{d}" for d in _degrees(ranks) for kind in ("ours", "fsdp2"))]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures.json")
        script = [_SCRIPT, *_arguments(names, rounds, out)]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        subprocess.run(
            [*command, f"--nproc-per-node={ranks}", *script], check=True, stderr=subprocess.DEVNULL
        )
        return _times(out)


def _on_two_hosts(rate: float | None, rounds: int) -> Times:
    names = ["ddp", "fsdp2-4", "fsdp2-2", "ours-1", "ours-2", "ours-4"]
    if _DEEPSPEED:
        names += ["zero1", "zero2", "zero3", "hpz-2"]
    with tempfile.TemporaryDirectory() as folder, Cluster(hosts=2, ranks_per_host=2) as machines:
        machines.network.set_rate(rate)
        out = Path(folder, "figures.json")
        machines.torchrun([_SCRIPT, *_arguments(names, rounds, out)], timeout_s=3600)
        return _times(out)


def _times(out: Path) -> Times:
    found: Times = json.loads(out.read_text())
    del found["bytes of the model"]
    return found


def _degrees(ranks: int) -> list[int]:
    return [degree for degree in range(2, ranks + 1) if ranks % degree == 0]


def _arguments(names: Sequence[str], rounds: int, out: Path) -> list[str]:
    return ["--names", *names, "--rounds", str(rounds), "--out", str(out)]


def _checks_on_one_host(ranks: int, times: Times) -> list[Check]:
    checks = []
    for degree in _degrees(ranks):
        ours = f"ours-{degree}"
        for peer, target in ((f"fsdp2-{degree}", 0.9), ("ddp", 1.05)):
            what = f"one host, {ranks} ranks: {ours} / {peer}"
            checks.append(Check(section="A", what=what, value=_ratio(times, ours, peer), target=target))
    return checks


def _checks_on_two_hosts(name: str, times: Times) -> list[Check]:
    ours = [contender for contender in times if contender.startswith("ours")]
    peers = [contender for contender in times if not contender.startswith("ours")]
    best = min(ours, key=lambda contender: statistics.median(times[contender]))
    rival = min(peers, key=lambda contender: statistics.median(times[contender]))
    checks = [
        Check(
            section="A",
            what=f"two hosts, {name}: {best} / {rival}, the best of both",
            value=_ratio(times, best, rival),
            target=1.0,
        )
    ]
    for peer in ("fsdp2-4", "zero3") if name != "no limit" else ():
        if peer in times:
            what = f"two hosts, {name}: {best} / {peer}"
            checks.append(Check(section="A", what=what, value=_ratio(times, best, peer), target=0.6))
    return checks


def _ratio(times: Times, ours: str, peer: str) -> float:
    """Median over rounds."""
    return statistics.median(a / b for a, b in zip(times[ours], times[peer], strict=True))


# ---- B: bytes ----


def _bytes(options: argparse.Namespace) -> Section:
    if (missing := missing_for_networks()) is not None:
        print(f"bytes between hosts: not measured, {missing}")
        return {}, []
    traffic = _traffic(4 if options.quick else 10)
    checks = [
        Check(
            section="B",
            what=f"bytes between hosts / formula, {name}",
            value=max(measured / expected, expected / measured),
            target=1.05,
            where=f"{format_bytes(int(measured))} a host and step",
        )
        for name, (measured, expected) in traffic.items()
    ]
    return {"bytes between hosts": traffic}, checks


def _traffic(steps: int) -> dict[str, tuple[float, float]]:
    """For each degree, the bytes that a host sends in a step, and the formula: see docs/sharding.md."""
    found = {}
    for degree in (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder, Cluster(hosts=2, ranks_per_host=2) as machines:
            sent = []
            for rounds in (1, 1 + steps):
                before = machines.traffic()[0].sent_bytes
                script = [_SCRIPT, *_arguments([f"ours-{degree}"], rounds, Path(folder, "out.json"))]
                machines.torchrun(script, timeout_s=600)
                sent.append(machines.traffic()[0].sent_bytes - before)
            size = json.loads(Path(folder, "out.json").read_text())["bytes of the model"][0]
        # Over two hosts: an all-reduce of all gradients, or of what a rank keeps, by two ranks; or a
        # reduce-scatter and an all-gather, which send half of it each.
        found[f"ours-{degree}"] = (sent[1] - sent[0]) / (2 * steps), float(size)
    return found


# ---- C: parity ----


def _parity(options: argparse.Namespace) -> Section:
    apart = _apart(2 if options.quick else 20)
    worst = max(apart, key=lambda name: apart[name])
    check = Check(
        section="C",
        what="loss apart from DDP's / 1e-5",
        value=apart[worst] / 1e-5,
        target=1,
        where=worst,
    )
    return {"parity": apart}, [check]


def _apart(steps: int) -> dict[str, float]:
    """For each setting, how far losses are from DDP's."""
    from sharding_parity import losses_of_ddp, losses_of_ours
    from shardwright.testing import run_ranks

    expected = run_ranks(losses_of_ddp, 4, steps, timeout_s=600)[0]
    found = {}
    for pipeline in (1, 2):
        for degree in (1, 2, 4) if pipeline == 1 else (1, 2):
            for microbatches in (1, 4):
                settings = {
                    "pipeline_parallel_degree": pipeline,
                    "data_parallel_degree": 4 // pipeline,
                    "sharded_data_parallel_degree": degree,
                    "microbatches": microbatches,
                }
                losses = run_ranks(losses_of_ours, 4, steps, settings, timeout_s=600)[0]
                name = f"pipeline {pipeline}, degree {degree}, {microbatches} microbatches"
                found[name] = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    return found


# ---- D: memory ----


def _memory(options: argparse.Namespace) -> Section:
    from memory_limit import missing_for_memory_limits
    from sharding_memory import largest_checks, largest_models, state_check, states

    kept = states(quick=options.quick)
    figures: Figures = {
        "bytes of a rank: parameters, gradients, optimizer; all; formula": {
            name: (*astuple(measured), measured.total, expected.total)
            for name, (measured, expected) in kept.items()
        }
    }
    missing = missing_for_memory_limits()
    if missing is not None:
        print(f"largest model within a limit: not measured, {missing}")
        return figures, [state_check(kept)]
    largest = largest_models(quick=options.quick)
    figures["largest model within a limit"] = {
        f"degree {degree}": (
            f"{one.measured / 1e6:.1f} million parameters",
            f"predicted {one.predicted / 1e6:.1f}",
            f"beside states {format_bytes(one.beside_bytes)}",
            f"and {one.block_bytes / one.block_states:.0%} a block",
            f"where it is kept {one.default_bytes / one.kept_bytes - 1:+.0%}",
        )
        for degree, one in largest.items()
    }
    return figures, [state_check(kept), *largest_checks(largest)]


# ---- what is asked for and printed ----


def _table(figures: dict[str, Any]) -> str:
    rows = []
    for name, values in figures.items():
        if isinstance(values, list):
            quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
            spread = (quartiles[2] - quartiles[0]) / 2
            rows.append([name, format_seconds(statistics.median(values)), f"+- {format_seconds(spread)}"])
        elif isinstance(values, tuple):
            rows.append([name, *(v if isinstance(v, str) else format_bytes(int(v)) for v in values)])
        else:
            rows.append([name, f"{values:.1e}"])
    return align(rows)


_SECTIONS: dict[str, Callable[[argparse.Namespace], Section]] = {
    "one-host": _one_host,
    "two-hosts": _two_hosts,
    "bytes": _bytes,
    "parity": _parity,
    "memory": _memory,
}


def _options() -> argparse.Namespace:
    parser = parser_for(__doc__, quick="one round, few steps")
    parser.add_argument("--only", choices=_SECTIONS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="on one host")
    parser.add_argument("--links", nargs="+", choices=_RATES, default=list(_RATES), help="between two hosts")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
    return options


if __name__ == "__main__":
    sys.exit(main())
