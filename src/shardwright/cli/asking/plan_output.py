"""Writes the plan file of a command."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwright.errors import UsageError

if TYPE_CHECKING:
    from shardwright.plan import Plan

__all__ = ["Output", "check_output", "write_plan"]

Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the plan file, for run --plan.")
]


def check_output(output: Path) -> None:
    """Refuses a place that cannot be written, before minutes of work; folders are made later.

    Raises:
        UsageError: it cannot.
    """
    from shardwright.files import check_place  # it imports pydantic: --help answers before

    if not output.absolute().parent.is_dir():
        return
    try:
        check_place(output)
    except OSError as error:
        raise _unwritable(output, error) from error


def write_plan(plan: "Plan", output: Path) -> None:
    """Writes the file.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        plan.write(output)
    except OSError as error:
        raise _unwritable(output, error) from error


def _unwritable(output: Path, error: OSError) -> UsageError:
    return UsageError(f"--output {output} cannot be written: {error.strerror}.")
