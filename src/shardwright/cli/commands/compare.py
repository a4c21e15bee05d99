"""``shardwright compare``: two plans side by side."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.asking.application import AsJson, print_json, show_text
from shardwright.cli.asking.run_path import read_plan, run_path
from shardwright.exit_codes import FAILED
from shardwright.plan.diff import diff_plans

First = Annotated[
    Path, typer.Argument(metavar="PLAN", callback=run_path, help="A plan file, or a run, by name or folder.")
]
Second = Annotated[
    Path, typer.Argument(metavar="OTHER_PLAN", callback=run_path, help="What to compare it with.")
]


def compare(first: First, second: Second, as_json: AsJson = False) -> None:
    """Compare two plans, or those of two runs: which units, degrees and settings differ.

    Exit code 0: they decide alike (predictions may differ). 1: they differ.

    For example: shardwright compare runs/train runs/train-2
    """
    found = diff_plans(read_plan(first), read_plan(second))
    if as_json:
        print_json({"alike": not found.decision, **asdict(found)})
    else:
        show_text(found)
    if found.decision:
        raise typer.Exit(FAILED)
