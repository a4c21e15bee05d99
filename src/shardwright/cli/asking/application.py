"""The base of every command-line application."""

import json
import os
import shutil
import sys
from collections.abc import Mapping
from typing import Annotated, Any, TextIO

import typer

from shardwright.cli.asking.misuse import Group
from shardwright.quantities import MOST_NODES
from shardwright.text import folded, printable

NUM_RANKS = ("--num-ranks", "-n")
"""The number of ranks, in every command that has one."""

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

NumNodes = Annotated[int, typer.Option("--nnodes", min=1, max=MOST_NODES, help="Hosts.")]
NodeRank = Annotated[
    int | None, typer.Option("--node-rank", min=0, max=MOST_NODES, help="Number of this host, from 0.")
]
Endpoint = Annotated[
    str | None, typer.Option("--rdzv-endpoint", metavar="HOST:PORT", help="Where the hosts meet.")
]


def new_application(*, text: str | None = None, other_names: Mapping[str, str] | None = None) -> typer.Typer:
    """An application without commands, quick to start; `_` is `-` in all names.

    `other_names` of options and choices are understood, and no help shows them: ``{"to": "output"}``.
    """

    def name_of(typed: str) -> str:
        return (other_names or {}).get(typed, typed).replace("_", "-")

    settings: dict[str, Any] = {"help_option_names": ["-h", "--help"], "token_normalize_func": name_of}
    return typer.Typer(
        cls=Group,
        help=text,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # importing rich would take half of the time that --help may take
        context_settings=settings,
    )


def show_text(text: object = "", *, end: str = "\n", folds: bool = True) -> None:
    """Prints a result: names in it, from files and folders, reach the terminal escaped.

    Where the reader has left (``| head -1``), it prints nothing: the command ends with its own exit code.
    """
    try:
        # Here alone: all else would not escape. Flushed, so that the reader's end shows here.
        print(_shown_on(sys.stdout, text, folds=folds), end=end, flush=True)  # noqa: T201
    except BrokenPipeError:
        # The interpreter flushes what is left when it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def clear_screen() -> None:
    """Has what is printed next begin at the top of an empty terminal; nothing where it goes elsewhere."""
    if sys.stdout.isatty():
        print("\x1b[H\x1b[J", end="")  # noqa: T201


def say(text: object) -> None:
    """Prints a message beside the result to stderr; escaped and folded as well."""
    print(_shown_on(sys.stderr, text), file=sys.stderr, flush=True)  # noqa: T201


def print_json(document: Any) -> None:
    """Prints a document as indented JSON, in ASCII."""
    show_text(json.dumps(document, indent=2), folds=False)


def _shown_on(stream: TextIO, text: object, *, folds: bool = True) -> str:
    safe = printable(str(text), lines=True)
    return folded(safe, shutil.get_terminal_size().columns) if folds and stream.isatty() else safe
