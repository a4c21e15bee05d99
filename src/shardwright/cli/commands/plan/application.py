"""The group ``shardwright plan``, with the commands that show a plan and compare two."""

from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli.asking.application import AsJson, new_application, print_json, show_text
from shardwright.cli.asking.misuse import Group
from shardwright.cli.asking.run_path import run_path
from shardwright.errors import PlanError
from shardwright.exit_codes import FAILED

if TYPE_CHECKING:
    from shardwright.plan import Plan

__all__ = ["application", "diff", "function_of"]


_SUMMARIES = {
    "make": "Make a plan without running it.",
    "show": "Show a plan, or the plan of a run.",
    "diff": "Compare two plans; exit code 1 if they differ.",
}


class _PlanGroup(Group):
    """``shardwright plan -n 512 model.py:build`` is ``plan make``: no command is called so."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = args[0] if args else "--help"
        is_help = first in ("-h", "--help")
        if not is_help and first not in self.commands and (first.startswith("-") or ":" in first):
            args = ["make", *args]
        if args and args[0] in _SUMMARIES:
            self.commands[args[0]] = _loaded(args[0])
        return super().parse_args(ctx, args)


_OTHER_NAMES = {"world": "num-ranks"}

application = new_application(
    group=_PlanGroup,
    other_names=_OTHER_NAMES,
    text="Make a plan without running it, show one, compare two. Without a command: make.",
)


def _not_loaded() -> None:
    raise AssertionError("a command ran that was only there to be listed")


for _name, _summary in _SUMMARIES.items():
    application.command(_name, short_help=_summary)(_not_loaded)


def function_of(name: str) -> Any:
    """The function of a command."""
    own = {"show": show, "diff": diff}
    return own.get(name) or import_module("shardwright.cli.commands.plan.make").make


def _loaded(name: str) -> Any:
    """A command itself: it, and the types of its options, take imports that ``plan --help`` does without."""
    alone = new_application(other_names=_OTHER_NAMES)
    alone.command(name)(function_of(name))
    return typer.main.get_command(alone)


_PLAN = "A plan file, or a run, by name or folder."
PlanPath = Annotated[Path, typer.Argument(metavar="PLAN", callback=run_path, help=_PLAN)]


def show(plan: PlanPath, as_json: AsJson = False) -> None:
    """Show a plan: stages, predicted times and memory, the reasons, the runners-up.

    For example: shardwright plan show runs/2026-11-20_12-58-37
    """
    from shardwright.observe.plan_text import format_plan_in_full

    found = _read(plan)
    if as_json:
        show_text(found.to_json(), end="", folds=False)
    else:
        show_text(format_plan_in_full(found))


def diff(
    first: Annotated[Path, typer.Argument(metavar="PLAN", callback=run_path, help=_PLAN)],
    second: Annotated[Path, typer.Argument(metavar="OTHER_PLAN", callback=run_path, help="Another.")],
    as_json: AsJson = False,
) -> None:
    """Compare two plans: which units moved, which degrees and settings changed.

    Exit code 0: they decide alike (predictions may differ). 1: they differ. 2: one cannot be read.
    """
    from shardwright.plan.diff import diff_plans

    found = diff_plans(_read(first), _read(second))
    if as_json:
        print_json({"alike": not found.decision, **asdict(found)})
    else:
        show_text(found)
    if found.decision:
        raise typer.Exit(FAILED)


def _read(path: Path) -> "Plan":
    from shardwright.plan import Plan

    if not path.is_dir():
        return Plan.read(path)
    file = path / "plan.json"
    if not file.exists():
        raise PlanError(
            f"{path} is a folder without a plan.json. A run writes it after its first step, "
            "when it has more than one stage. Name a run folder that has one, or a plan file."
        )
    return Plan.read(file)
