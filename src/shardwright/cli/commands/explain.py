"""``shardwright explain``: explains a plan, its limits, and what would help."""

from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.asking.application import AsJson, print_json, show_text
from shardwright.cli.asking.run_path import run_path
from shardwright.observe.explanation import explanation_document, format_explanation
from shardwright.observe.report.gathered.data import gather

__all__ = ["explain"]

PlanOrRun = Annotated[
    Path,
    typer.Argument(
        metavar="PLAN_OR_RUN", callback=run_path, help="A plan file, or a run, by name or folder."
    ),
]


def explain(plan_or_run: PlanOrRun, as_json: AsJson = False) -> None:
    """Say why this plan, what its step is spent on, where memory goes, and what would make it faster.

    For example: shardwright explain runs/2026-11-20_12-58-37
    """
    data = gather(plan_or_run)
    if as_json:
        print_json(explanation_document(data))
    else:
        show_text(format_explanation(data))
