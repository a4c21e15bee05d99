"""Measures Shardwright's collectives side by side with gloo's, on one host and on two.

python benchmarks/collectives.py
python benchmarks/collectives.py --only one-host --ranks 4
python benchmarks/collectives.py --quick            # does it still run?

Two hosts are network namespaces of this machine (root and iproute2 are needed), with two ranks each, and
links of 100 Mbit/s, 1 Gbit/s and without a limit.
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

from check import Check, lines
from collectives_ranks import COLLECTIVES, Timing, time_collectives
from machine import circumstances
from shardwright.quantities import format_bytes, format_seconds
from shardwright.testing import run_ranks
from shardwright.testing.cluster import Cluster, missing_for_networks
from shardwright.text import align

_SIZES = [2**exponent for exponent in range(10, 27, 2)]
_SLOW_SIZES = [2**exponent for exponent in range(10, 23, 2)]
_LINKS = {"100 Mbit/s": 100e6, "1 Gbit/s": 1e9, "no limit": None}
_LARGE_BYTES = 2**20


def main() -> int:
    """Runs what is asked for."""
    options = _options()
    rounds = 2 if options.quick else options.rounds
    where = circumstances()
    print("\n".join(f"{key}: {value}" for key, value in where.items()))
    found: dict[str, list[Timing]] = {}
    if options.only in (None, "one-host"):
        for ranks in options.ranks:
            sizes = _SIZES[::4] if options.quick else _SIZES
            found[f"one host, {ranks} ranks"] = run_ranks(
                time_collectives, ranks, COLLECTIVES, sizes, rounds, timeout_s=1800
            )[0]
    missing = missing_for_networks()
    if options.only in (None, "two-hosts"):
        if missing is not None:
            print(f"two hosts: not measured, {missing}")
        else:
            for name, rate in _LINKS.items():
                sizes = _SIZES if rate is None else _SLOW_SIZES
                found[f"two hosts x 2 ranks, {name}"] = _on_two_hosts(
                    rate, sizes[::4] if options.quick else sizes, rounds
                )
    checks = _checks(found)
    if not options.check:
        for name, timings in found.items():
            print(f"\n{name}\n{_table(timings)}")
        print()
    print("\n".join(lines(checks)))
    if options.json is not None:
        document = {
            "circumstances": where,
            "timings": {name: [asdict(timing) for timing in timings] for name, timings in found.items()},
            "checks": [asdict(check) | {"passes": check.passes} for check in checks],
        }
        options.json.write_text(json.dumps(document, indent=1))
    return 1 if options.check and not all(check.passes for check in checks) else 0


def _on_two_hosts(rate: float | None, sizes: list[int], rounds: int) -> list[Timing]:
    script = Path(__file__).with_name("collectives_ranks.py")
    with tempfile.TemporaryDirectory() as folder, Cluster(hosts=2, ranks_per_host=2) as machines:
        machines.network.set_rate(rate)
        out = Path(folder, "figures.json")
        argv = [str(script), "--sizes", *map(str, sizes), "--rounds", str(rounds), "--out", str(out)]
        machines.torchrun(argv, timeout_s=1800)
        return [Timing(**row) for row in json.loads(out.read_text())]


def _checks(found: dict[str, list[Timing]]) -> list[Check]:
    checks = []
    for name, timings in found.items():
        large = [timing for timing in timings if timing.num_bytes >= _LARGE_BYTES]
        if name.startswith("one host") and large:
            checks.append(_worst(f"{name}: ours / gloo at 1 MiB and above", large, 0.5))
        checks.append(_worst(f"{name}: ours / gloo", timings, 1.05))
    return checks


def _worst(what: str, timings: list[Timing], target: float) -> Check:
    worst = max(timings, key=lambda timing: timing.ratio)
    where = f"{worst.collective}, {format_bytes(worst.num_bytes)}"
    return Check(section="C", what=what, value=worst.ratio, target=target, where=where)


def _table(timings: list[Timing]) -> str:
    rows = [["collective", "bytes", "ours", "gloo", "ours / gloo", "spread"]]
    for timing in timings:
        times = (format_seconds(timing.ours_s), format_seconds(timing.gloo_s))
        rows.append(
            [
                timing.collective,
                format_bytes(timing.num_bytes),
                *times,
                f"{timing.ratio:.2f}",
                f"{timing.spread:.2f}",
            ]
        )
    return align(rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=["one-host", "two-hosts"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="on one host")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="two rounds of few sizes")
    parser.add_argument("--check", action="store_true", help="only the targets; exit 1 where one is missed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
