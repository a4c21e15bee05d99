"""The base of every command-line application."""

import json
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from shardwright.printable import printable

__all__ = ["AsJson", "BuildOn", "Factory", "new_application", "print_json", "say", "show_text"]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Factory = Annotated[
    str,
    typer.Argument(
        metavar="FACTORY",
        help="model.py:build or package.model:build, which returns (model, batch) or (model, batch, loss).",
    ),
]
BuildOn = Annotated[
    str, typer.Option("--build-on", metavar="DEVICE", help="Where FACTORY runs; meta takes no memory.")
]


def new_application(*, group: type[TyperGroup] = TyperGroup, text: str | None = None) -> typer.Typer:
    """An application without commands, quick to start.

    Args:
        group: class of the group of its commands.
        text: what ``--help`` says.
    """
    return typer.Typer(
        cls=group,
        help=text,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # importing rich would take half of the time that --help may take
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def show_text(text: object = "", *, end: str = "\n") -> None:
    """Prints a result: names in it, from files and folders, reach the terminal escaped."""
    print(printable(str(text), lines=True), end=end)  # noqa: T201  (here alone: all else would not escape)


def say(text: object) -> None:
    """Prints a message beside the result to stderr; escaped as well."""
    print(printable(str(text), lines=True), file=sys.stderr, flush=True)  # noqa: T201


def print_json(document: Any) -> None:
    """Prints a document as indented JSON, in ASCII."""
    show_text(json.dumps(document, indent=2))
