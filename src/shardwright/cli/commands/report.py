"""``shardwright report``: writes one HTML file for a run or a plan."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.asking.application import AsJson, print_json, say, show_text
from shardwright.cli.asking.run_path import run_path
from shardwright.observe.report import gather, write_report
from shardwright.observe.run_folder import RunFolder

RunOrPlan = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_OR_PLAN", callback=run_path, help="A run, by name or folder, or a plan file."
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help="Default: report.html in RUN, PLAN.html beside PLAN."
    ),
]
Open = Annotated[bool, typer.Option("--open", help="Open it in a browser.")]


def report(
    run_or_plan: RunOrPlan, output: Output = None, show: Open = False, as_json: AsJson = False
) -> None:
    """Write what a run or a plan comes to as one HTML file, to be read without a network.

    For example: shardwright report runs/2026-11-20_12-58-37 --open
    """
    if as_json:
        print_json(gather(run_or_plan).to_dict())
        return
    default = RunFolder(run_or_plan).report_file if run_or_plan.is_dir() else run_or_plan.with_suffix(".html")
    written = write_report(run_or_plan, output or default)
    show_text(written)
    if show and not webbrowser.open(written.absolute().as_uri()):
        say(f"no browser could be opened; open {written} yourself")
