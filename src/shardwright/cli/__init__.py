"""The command line: ``shardwright COMMAND``.

A command is a function in its own file in ``commands/`` (``run`` in ``run.py``), and a line in
`COMMANDS`; a group of commands is an application in its own file, or a folder. Only the requested command is
imported, so that ``shardwright --help`` answers at once.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Annotated, Any

import typer

from shardwright import __version__
from shardwright.cli.asking.application import new_application, say, show_text
from shardwright.cli.asking.misuse import CommandLineError, refuse_former, reworded
from shardwright.errors import ShardwrightError, UsageError
from shardwright.exit_codes import FAILED, OK, USAGE, exit_code_of
from shardwright.text import control_in, shown

__all__ = ["COMMANDS", "Command", "main"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command: the function ``name`` of `shardwright.cli.commands.<name>`, or a group of commands."""

    name: str
    summary: str
    is_group: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    def load(self) -> Any:
        module = import_module(f"shardwright.cli.commands.{self.name}")
        return getattr(module, "application" if self.is_group else self.name)


COMMANDS = (
    Command(
        name="run",
        summary="Run a script on several ranks of this host, or of several hosts.",
        # What follows the script belongs to it, also where it looks like an option of ours.
        settings={"allow_interspersed_args": False},
    ),
    Command(name="plan", summary="Make a plan without running it."),
    Command(name="search", summary="Find the best way to train a model on machines that need not be there."),
    Command(name="explain", summary="Say what a step is spent on, what limits it, and what would help."),
    Command(name="show", summary="Show what a run came to, beside what was predicted; or a plan."),
    Command(name="compare", summary="Compare two plans, or those of two runs: what is different."),
    Command(name="report", summary="Write what a run or a plan comes to as one HTML file."),
    Command(
        name="status", summary="Show what each rank of a run does now, or did last before it was killed."
    ),
    Command(name="runs", summary="List the runs of a folder."),
    Command(name="ckpt", summary="List, verify, export, import and clear checkpoints.", is_group=True),
    Command(name="catalogue", summary="List models and machines by name; show machines, write their file."),
    Command(name="schedule", summary="Draw a pipeline schedule, with its bubble."),
    Command(name="profile", summary="Measure what the units of a model cost on this machine."),
    Command(name="trace", summary="Show what a model consists of: units, FLOPs, bytes, ties."),
    Command(name="probe", summary="Measure the present machines: devices, memory, links, collectives."),
    Command(name="doctor", summary="Show what this machine has: a block to paste into an issue."),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits with one of the codes of `shardwright.exit_codes`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _refuse_control_characters(words)
        refuse_former(words)
        code = _run(words)
    except ShardwrightError as error:
        say(f"{type(error).__name__}: {error}")
        code = exit_code_of(error)
    sys.exit(code)


def _run(words: Sequence[str]) -> int:
    try:
        return _application(words)(words, prog_name="shardwright", standalone_mode=False) or OK
    except CommandLineError as error:
        better = reworded(error)
        if better is not None:
            raise better from error
        say(error)
        return USAGE
    except typer.Abort:
        say("stopped")
        return FAILED


def _refuse_control_characters(words: Sequence[str]) -> None:
    """Refuses control characters in the words of a command; a script's own words are its own."""
    own = words[: words.index("run") + 1] if "run" in words[:2] else words
    for word in own:
        if (control := control_in(word)) is not None:
            raise UsageError(f"{shown(word)} has a control character, {control}. No name has; leave it out.")


_TEXT = (
    "Train PyTorch and Keras models too big or too slow for one device. "
    "For example: shardwright run -n 2 train.py"
)


def _application(words: Sequence[str]) -> typer.Typer:
    application = new_application(text=_TEXT)
    wanted = next((word.replace("_", "-") for word in words if not word.startswith("-")), None)
    if not words or words[0].startswith("-"):
        application.callback()(_shardwright)
    else:  # To read an option, typer imports pydantic, which takes longer than a page of help.
        application.callback(add_help_option=False)(_nothing)
    for command in COMMANDS:
        is_wanted = command.name == wanted
        if is_wanted and command.is_group:
            application.add_typer(command.load(), name=command.name, short_help=command.summary)
            continue
        function = command.load() if is_wanted else _not_loaded
        # Without a short help the list would cut the long one off.
        text = None if is_wanted else command.summary
        application.command(command.name, help=text, short_help=command.summary)(function)
        application.registered_commands[-1].context_settings = command.settings
    return application


def _not_loaded() -> None:
    raise AssertionError("a command ran that was only there to be listed")


def _nothing() -> None:
    """Takes no options: a command stands first."""


def _print_version(wanted: bool) -> None:
    if wanted:
        show_text(f"shardwright {__version__}")
        raise typer.Exit


def _shardwright(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Takes the options that stand before a command."""
