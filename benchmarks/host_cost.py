"""Measures a rank's processor time in a steady step, beside others that do the same work.

    OMP_NUM_THREADS=1 python benchmarks/host_cost.py --quick --check     # what has a target; 3 minutes
    OMP_NUM_THREADS=1 python benchmarks/host_cost.py --only pipelines
    OMP_NUM_THREADS=1 python benchmarks/host_cost.py --profile 40 --model "tiny 8" --layout 1F1B

Figures are of the main thread's processor time (`time.thread_time`), the mean of a contestant's ranks: they
stay nearly the same on a machine that others use, too. "All threads" counts what helpers of it do, too: DDP's
messages are the work of others. A plain loop runs on one rank, so its mean is a rank's
share of it. Ours and its rivals take turns, so ratios are taken round by round (see `host_cost_race`).

Sections: pipelines, models, one, replicas, extras, calls, tensor, record, parts.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from check import Check
from host_cost_notes import BEAT_EACH_S, cost_of_notes
from host_cost_profile import functions_table, modules_table
from host_cost_race import Result, Sides
from host_cost_ranks import Row
from sections import Section, parser_for, run_sections
from shardwright.schedule import build_schedule
from shardwright.text import align

_LAYOUTS = ("one", "1F1B", "Interleaved1F1B", "replicas", "shards")
_PROFILED_STEPS = 20
_MOST_CALLS, _MOST_FILES = 6_000, 60
_TENSOR_US = 10.0


class Benchmark:
    """All sections, on one pair of sides.

    Attributes:
        results: of all rows.
    """

    def __init__(self, sides: Sides):
        self._sides = sides
        self.results: list[Result] = []

    def pipelines(self, options: argparse.Namespace) -> Section:
        """Stages of tiny blocks."""
        rows = [Row(model=f"tiny {blocks}", layout="1F1B") for blocks in (8, 32)]
        if not options.quick:
            rows += [
                Row(model=f"tiny {blocks}", layout=layout, ranks=ranks, microbatches=microbatches)
                for blocks in (8, 32, 128)
                for ranks in (2, 4)
                for layout in ("1F1B", "Interleaved1F1B")
                for microbatches in (4, 16)
            ]
        results = self._measure(rows, options)
        held = [result for result in results if result.row in rows[:2]]
        return _table("Stages of tiny blocks", results), [
            _held("P", "ours / pipelining 1F1B", held, "1F1B", 1.10)
        ]

    def models(self, options: argparse.Namespace) -> Section:
        """Stages of transformers' models and of a convolutional net."""
        rows = [Row(model=name, layout="1F1B") for name in ("GPT-2", "OPT", "Llama")]
        if not options.quick:
            rows += [Row(model=row.model, layout="1F1B", microbatches=16) for row in rows]
            rows += [
                Row(model=name, layout="1F1B", microbatches=microbatches)
                for name in ("T5", "conv net")
                for microbatches in (4, 16)
            ]
            rows += [Row(model="GPT-2", layout="1F1B", ranks=4)]
        results = self._measure(rows, options)
        check = _held("M", "ours / a rank's share of the plain loop", results[:3], "plain", 1.25)
        return _table("Stages of models", results), [check]

    def one(self, options: argparse.Namespace) -> Section:
        """A rank alone."""
        names = ("tiny 8", "GPT-2") if options.quick else ("tiny 8", "tiny 32", "GPT-2", "conv net")
        rows = [Row(model=name, layout="one", ranks=1) for name in names]
        if not options.quick:
            rows += [Row(model="tiny 8", layout="one", ranks=1, microbatches=16)]
        results = self._measure(rows, options)
        return _table("One rank", results), [_held("O", "ours / plain loop", results, "plain", 1.10)]

    def replicas(self, options: argparse.Namespace) -> Section:
        """Data parallelism, whole and sharded."""
        kinds = (("replicas", "DDP", 1.00), ("shards", "FSDP2", 0.30))
        names = ("tiny 8",) if options.quick else ("tiny 8", "tiny 32", "GPT-2")
        checks, found = [], []
        for layout, rival, target in kinds:
            rows = [Row(model=name, layout=layout, microbatches=1) for name in names]
            results = self._measure(rows, options)
            checks.append(_held("R", f"{layout}, ours / {rival}", results, rival, target))
            if not options.quick:
                results += self._measure(
                    [Row(model="tiny 8", layout=layout, ranks=4, microbatches=1)], options
                )
            found += results
        return _table("Replicas and shards", found), checks

    def extras(self, options: argparse.Namespace) -> Section:
        """What scripts add to a step."""
        if options.quick:
            return {}, []
        sets = [(name,) for name in ("clipping", "scheduler", "autocast", "checkpoints")]
        rows = [
            Row(model=name, layout="1F1B", extras=extras)
            for name in ("tiny 8", "GPT-2")
            for extras in ((), *sets, ("clipping", "scheduler", "autocast", "checkpoints"))
        ]
        return _table("With what scripts add", self._measure(rows, options)), []

    def calls(self, _: argparse.Namespace) -> Section:
        """Python calls of a step with nothing to say."""
        row = Row(model="GPT-2", layout="1F1B")
        profiles = self._sides.profile(row, num_steps=2)
        busiest = max(profiles, key=lambda each: each.own_calls)
        files = max(profile.num_files for profile in profiles)
        checks = [
            Check(section="C", what=f"{what} of a step of GPT-2", value=value, target=target)
            for what, value, target in (
                ("calls in our files", busiest.own_calls, _MOST_CALLS),
                ("files of ours", files, _MOST_FILES),
            )
        ]
        rows = [["rank", "Python calls", "in our files", "files"]] + [
            [str(rank), f"{each.calls:.0f}", f"{each.own_calls:.0f}", str(each.num_files)]
            for rank, each in enumerate(profiles)
        ]
        return {f"Python calls of a step: {row}": rows}, checks

    def tensor(self, _: argparse.Namespace) -> Section:
        """Operations on divided tensors: `tensor_dispatch.py`."""
        script = Path(__file__).with_name("tensor_dispatch.py")
        printed = subprocess.run(
            [sys.executable, str(script), "--json"], check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        found = json.loads(printed)
        name = "forward_between_products_us"
        above_us = found["divided tensor"][name] - found["plain"][name]
        check = Check(
            section="T", what="us of an operation on divided tensors", value=above_us, target=_TENSOR_US
        )
        rows = [["us of an operation", *found["plain"]]]
        rows += [[kind, *(f"{us:.1f}" for us in row.values())] for kind, row in found.items()]
        return {"Operations on divided tensors, between products": rows}, [check]

    def record(self, options: argparse.Namespace) -> Section:
        """What each rank notes for `shardwright status` and for after a kill."""
        row = Row(model="GPT-2", layout="1F1B")
        (result,) = self._measure([row], options)
        actions = len(
            build_schedule("1f1b", stage_ranks=(0, 1), num_microbatches=row.microbatches).actions[0]
        )
        note_s, beat_s = cost_of_notes()
        share = actions * note_s / result.wall_s("ours") + beat_s / BEAT_EACH_S
        rows = [
            ["us of the notes of an action", f"{note_s * 1e6:.2f}"],
            ["us of a beat, of two a second", f"{beat_s * 1e6:.0f}"],
            ["actions of a step", str(actions)],
            ["share of a step", f"{share:.3%}"],
        ]
        check = Check(
            section="N", what="notes and beats, % of a step of GPT-2", value=100 * share, target=0.1
        )
        return {"What each rank notes": rows}, [check]

    def _measure(self, rows: Iterable[Row], options: argparse.Namespace) -> list[Result]:
        found = []
        for row in dict.fromkeys(rows):
            known = next((result for result in self.results if result.row == row), None)
            if known is None:
                print(f"... {row}", file=sys.stderr, flush=True)
                known = self._sides.measure(row, rounds=options.rounds)
                self.results.append(known)
            found.append(known)
        return found


def _held(section: str, what: str, results: Sequence[Result], rival: str, target: float) -> Check:
    """The worst of some rows against a target."""
    worst = max(results, key=lambda result: result.ratio(rival))
    return Check(
        section=section,
        what=f"{what}, processor time",
        value=worst.ratio(rival),
        target=target,
        where=str(worst.row),
    )


def _table(title: str, results: Sequence[Result]) -> dict[str, list[list[str]]]:
    head = [
        "",
        "contestant",
        "cpu ms a rank",
        "spread",
        "busiest rank",
        "ours / it",
        "all threads",
        "ours / it",
        "by the clock",
        "ours / it",
    ]
    rows = [head]
    for result in results:
        for name, times in result.times.items():
            rival = name != "ours"
            rows.append(
                [
                    "" if rival else str(result.row),
                    name,
                    f"{times.median_s * 1e3:.2f}",
                    f"{times.spread:.0%}",
                    f"{result.busiest_s(name) * 1e3:.2f}",
                    f"{result.ratio(name):.2f}" if rival else "",
                    f"{result.process_s(name) * 1e3:.2f}",
                    f"{result.process_s('ours') / result.process_s(name):.2f}" if rival else "",
                    f"{result.wall_s(name) * 1e3:.2f}",
                    f"{result.wall_ratio(name):.2f}" if rival else "",
                ]
            )
    return {title: rows}


def _profile(sides: Sides, options: argparse.Namespace) -> int:
    """Prints where the time of one row goes."""
    ranks = 1 if options.layout == "one" else options.ranks
    row = Row(model=options.model, layout=options.layout, ranks=ranks, microbatches=options.microbatches)
    profiles = sides.profile(row, num_steps=_PROFILED_STEPS)
    print(f"{row}: processor time of a step, mean of the ranks\n")
    print(align(modules_table(profiles)), "\n")
    print(align(functions_table(profiles, options.profile)))
    return 0


def main() -> int:
    """Measures, prints, and writes what is asked for; returns the exit status."""
    options = _options()
    os.environ["OMP_NUM_THREADS"] = "1"
    with Sides() as sides:
        if options.profile:
            return _profile(sides, options)
        benchmark = Benchmark(sides)
        names = ("pipelines", "models", "one", "replicas", "extras", "calls", "tensor", "record")
        sections: dict[str, Callable[[argparse.Namespace], Section]] = {
            name: getattr(benchmark, name) for name in names
        }
        return run_sections(
            options, sections, shown=align, more=lambda: {"rows": [_raw(each) for each in benchmark.results]}
        )


def _raw(result: Result) -> dict[str, Any]:
    turns = {name: [asdict(turn) for turn in each] for name, each in result.turns.items()}
    return {**asdict(result.row), "turns": turns}


def _options() -> argparse.Namespace:
    parser = parser_for(__doc__, quick="only the rows that have a target")
    parser.add_argument(
        "--only",
        help="one section",
        choices=["pipelines", "models", "one", "replicas", "extras", "calls", "tensor", "record"],
    )
    parser.add_argument("--rounds", type=int, help="turns of each contestant (default 7, 15)")
    parser.add_argument(
        "--profile", type=int, help="only print that many functions of ours, the dearest first"
    )
    parser.add_argument("--model", default="GPT-2", help="for --profile: see host_cost_models.py")
    parser.add_argument("--layout", default="1F1B", choices=_LAYOUTS, help="for --profile")
    parser.add_argument("--ranks", type=int, default=2, help="for --profile")
    parser.add_argument("--microbatches", type=int, default=4, help="for --profile")
    options = parser.parse_args()
    if options.rounds is None:
        options.rounds = 7 if options.quick else 15
    return options


if __name__ == "__main__":
    sys.exit(main())
