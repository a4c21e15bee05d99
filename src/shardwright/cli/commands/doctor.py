"""``shardwright doctor``: describes this machine, as one block to paste into an issue."""

import os
from pathlib import Path

import typer

from shardwright.cli.asking.application import AsJson, print_json, show_text
from shardwright.exit_codes import ENVIRONMENT
from shardwright.text import align


def doctor(as_json: AsJson = False) -> None:
    """Show what this machine has, and what will be in the way: a block to paste into an issue.

    Exit code 4: something is missing without which nothing can be trained here.
    """
    # Here: --help answers before.
    from shardwright.observe.doctor import examine

    found = examine(os.environ, folder=Path("runs"))
    if as_json:
        print_json({"facts": found.document, "problems": found.problems, "faults": found.faults})
    else:
        show_text(align([[name, fact] for name, fact in found.facts.items()]))
        show_text(
            "\n".join(["", *(f"! {text}" for text in found.problems)]) if found.problems else "\nno problems"
        )
    if found.faults:
        raise typer.Exit(ENVIRONMENT)
