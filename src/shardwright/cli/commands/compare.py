"""``shardwright compare``: two runs side by side, or two plans."""

import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.asking.application import AsJson, print_json, show_text
from shardwright.cli.asking.run_path import is_plan, read_plan, run_path
from shardwright.exit_codes import FAILED
from shardwright.observe.report import gather
from shardwright.observe.report.comparison import compare as compare_runs
from shardwright.plan.diff import diff_plans
from shardwright.text import align

_MOST_DIFFERENCES = 12
_LONGEST = 160  # letters of one side of a difference

First = Annotated[
    Path, typer.Argument(metavar="RUN", callback=run_path, help="A run, by name or folder, or a plan file.")
]
Second = Annotated[
    Path, typer.Argument(metavar="OTHER_RUN", callback=run_path, help="What to compare it with.")
]


def compare(first: First, second: Second, as_json: AsJson = False) -> None:
    """Compare two runs: their figures, and what was different; or two plans: which units, degrees, settings.

    Of two plans, exit code 0: they decide alike (predictions may differ). 1: they differ.

    For example: shardwright compare runs/train runs/train-2
    """
    if is_plan(first) and is_plan(second):
        found = diff_plans(read_plan(first), read_plan(second))
        if as_json:
            print_json({"alike": not found.decision, **asdict(found)})
        else:
            show_text(found)
        if found.decision:
            raise typer.Exit(FAILED)
        return
    comparison = compare_runs(gather(first), gather(second))
    if as_json:
        print_json(comparison.to_dict())
        return
    if comparison.labels != comparison.names:
        show_text(align(list(zip(comparison.labels, comparison.names, strict=True))))
    show_text(f"{comparison.verdict}.")
    rows = [row.cells() for row in comparison.rows]
    show_text(align([["", *comparison.labels, "change"], *rows]))
    if comparison.differences:
        show_text("what was different")
        shown = comparison.differences[:_MOST_DIFFERENCES]
        for each in shown:
            show_text(f"  {each.what}: {_short(each.first)} -> {_short(each.second)}")
        if len(comparison.differences) > len(shown):
            show_text(f"  and {len(comparison.differences) - len(shown)} more: --json has them")


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else textwrap.shorten(text, _LONGEST, placeholder=" ...")
