"""The command line: ``shardwright COMMAND``.

A command is a function of its own file, and a line in `COMMANDS`. Only the command that is asked for is
imported, so that ``shardwright --help`` answers at once.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Annotated, Any

import typer

from shardwright import __version__
from shardwright.cli.exit_codes import exit_code_of
from shardwright.errors import ShardwrightError

__all__ = ["COMMANDS", "Command", "main"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command: the function ``name`` (with ``_`` for ``-``) of the module ``shardwright.cli.<name>``.

    Attributes:
        name: as it is typed.
        summary: one line for ``shardwright --help``.
        settings: what click calls context settings.
    """

    name: str
    summary: str
    settings: dict[str, Any] = field(default_factory=dict)

    def load(self) -> Any:
        """Imports the function."""
        name = self.name.replace("-", "_")
        return getattr(import_module(f"shardwright.cli.{name}"), name)


COMMANDS = (
    Command(
        name="run",
        summary="Run a script on several ranks of this host, or of several hosts.",
        # What follows the script belongs to it, also where it looks like an option of ours.
        settings={"allow_interspersed_args": False},
    ),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits with one of the codes of `shardwright.cli.exit_codes`.

    Args:
        arguments: the words after ``shardwright``; by default those of this process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _application(words)(words, prog_name="shardwright")
    except ShardwrightError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(exit_code_of(error))


def _application(words: Sequence[str]) -> typer.Typer:
    application = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # importing rich would take half of the time that --help may take
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    application.callback()(_shardwright)
    wanted = next((word for word in words if not word.startswith("-")), None)
    for command in COMMANDS:
        function = command.load() if command.name == wanted else _not_loaded
        application.command(command.name, help=None if command.name == wanted else command.summary)(function)
        application.registered_commands[-1].context_settings = command.settings
    return application


def _not_loaded() -> None:
    raise AssertionError("a command ran that was only there to be listed")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"shardwright {__version__}")
        raise typer.Exit


def _shardwright(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train models too big or too slow for one device."""
