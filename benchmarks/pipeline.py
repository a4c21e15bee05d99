"""Measures pipelines side by side with `torch.distributed.pipelining`, and plans against what happened.

python benchmarks/pipeline.py                       # everything, about 75 minutes on two quiet cores
python benchmarks/pipeline.py --only A,B --ranks 2
python benchmarks/pipeline.py --quick               # a minute: does it still run?

A  the same layers on the same ranks, the same kind of schedule: 1F1B, interleaved, zero bubble
B  the schedule that the library chooses, against the best of the peer's seven
C  models with uneven layers: stages by the library, against an even split
D  against one process with one thread
E  what the runtime takes on top of the work
F  cases at the limits of the peer, tried on both sides
G  predicted steps against measured ones: of every plan of A to D
H  predicted memory against measured memory
"""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("SHARDWRIGHT_CACHE", "off")  # costs are measured in this run

from check import Check, lines
from courses import courses
from limits import limits_check, limits_table, try_limits
from machine import circumstances
from memory import measure_memory, memory_check, memory_table
from overhead import measure_overhead, overhead_table
from race import Final, Result
from shardwright.text import align
from speed_report import finals_table, prediction_check, prediction_rows, speed_checks, speed_tables

SECTIONS = "ABCDEFGH"
_RACES = "ABCD"
_RANKS = (2, 4)


def main() -> int:
    """Runs the sections that are asked for."""
    options = _options()
    sections = options.only or SECTIONS
    report = _Report(checks_only=options.check)
    report.say("\n".join(f"{key}: {value}" for key, value in report.circumstances.items()))
    # G judges the plans of whatever is raced; of everything where nothing is.
    races = _RACES if "G" in sections and not set(sections) & set(_RACES) else sections
    rounds = 2 if options.quick else options.repeats
    results: list[Result] = []
    finals: list[Final] = []
    for course in courses(races, quick=options.quick):
        if course.ranks not in options.ranks:
            continue
        report.progress(str(course))
        found = _quietly(lambda c=course: c.run(rounds=rounds, patience_s=options.patience))
        results += found[0]
        finals += found[1]
        report.raw |= {"races": results, "finals": finals}
        report.write(options.json)  # what is measured is kept, whatever happens to the next race
    for title, table in speed_tables(results):
        report.table(title, table)
    finals = [final for final in finals if final.match.section in sections]
    report.table("Finals: ours and its fastest rival in turns", finals_table(finals))
    report.checks += speed_checks(finals)
    if "E" in sections:
        report.progress("E: overhead")
        found = report.keep("overhead", _quietly(lambda: measure_overhead(quick=options.quick)))
        report.table("E. The runtime on units that hardly do any work", overhead_table(found))
    if "F" in sections:
        report.progress("F: limits")
        verdicts = report.keep("limits", _quietly(lambda: try_limits(quick=options.quick)))
        report.table("F. At the limits of the peer", limits_table(verdicts))
        report.checks += limits_check(verdicts)
    if "G" in sections:
        report.table("G. Predicted steps against measured ones", prediction_rows(results))
        report.checks += prediction_check(results)
    if "H" in sections:
        report.progress("H: memory")
        footprints = report.keep("memory", _quietly(lambda: measure_memory(quick=options.quick)))
        report.table("H. Predicted memory against measured memory", memory_table(footprints))
        report.checks += memory_check(footprints)
    report.write(options.json)
    if options.check or not options.quick:
        print("\nTargets, the worst figure last\n\n" + "\n".join(lines(report.checks)))
    return 1 if options.check and not all(check.passes for check in report.checks) else 0


class _Report:
    """Prints what was found, and keeps it for the JSON file."""

    def __init__(self, *, checks_only: bool):
        self._checks_only = checks_only
        self.circumstances = circumstances()
        self.checks: list[Check] = []
        self.raw: dict[str, Any] = {}

    def say(self, text: str) -> None:
        """Prints, unless only the targets are wanted."""
        if not self._checks_only:
            print(text, flush=True)

    def progress(self, text: str) -> None:
        """What runs now, on stderr."""
        print(f"... {text}", file=sys.stderr, flush=True)

    def table(self, title: str, rows: list[list[str]]) -> None:
        """A table below its title; the first row is the header."""
        if len(rows) > 1:
            self.say(f"\n{title}\n\n{align(rows)}")

    def keep(self, name: str, found: Any) -> Any:
        """Puts something into the JSON file."""
        self.raw[name] = found
        return found

    def write(self, path: Path | None) -> None:
        """All raw figures, with where they come from."""
        if path is None:
            return
        checks = [{**dataclasses.asdict(check), "passes": check.passes} for check in self.checks]
        document = {**self.circumstances, "checks": checks, **self.raw}
        path.write_text(json.dumps(document, default=dataclasses.asdict, indent=1) + "\n")


def _quietly(run: Callable[[], Any]) -> Any:
    """Without the lines that the library prints on every rank's console; they are shown if it fails."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            return run()
    except BaseException:
        sys.stderr.write(said.getvalue())
        raise


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny models, turns of two rounds, some cases")
    parser.add_argument("--check", action="store_true", help="print targets only; fail if one is missed")
    parser.add_argument("--only", type=_letters, help="sections, for example A,C")
    parser.add_argument(
        "--repeats",
        type=int,
        default=5,
        help="rounds of every turn of a final, of which there are two to five (default 5)",
    )
    parser.add_argument(
        "--patience", type=float, default=0.0, help="seconds a race may take longer to get quiet runs"
    )
    parser.add_argument("--ranks", type=_ranks, default=_RANKS, help="of the races (default 2,4)")
    parser.add_argument("--json", type=Path, help="file for all raw figures")
    return parser.parse_args()


def _ranks(text: str) -> tuple[int, ...]:
    found = tuple(map(int, text.split(",")))
    if set(found) - set(_RANKS):  # no race would be run, and every target met
        raise argparse.ArgumentTypeError(f"{text!r}: there are races of 2 and of 4 ranks")
    return found


def _letters(text: str) -> str:
    letters = text.upper().replace(",", "")
    if not letters or set(letters) - set(SECTIONS):
        raise argparse.ArgumentTypeError(f"{text!r}: give letters of {SECTIONS}, for example A,C")
    return letters


if __name__ == "__main__":
    sys.exit(main())
