"""Finds a run by its name, as `shardwright runs` lists it, where a path is asked for; and the plan in it."""

from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.errors import PlanError

if TYPE_CHECKING:
    from shardwright.plan import Plan

__all__ = ["is_plan", "listing", "read_plan", "run_path"]


def run_path(given: Path | None) -> Path | None:
    """The path; if there is nothing, and ``runs/`` has a run of this name, that of the run.

    A path that is not found stays as it was given, for the error.
    """
    if given is None or given.exists() or len(given.parts) != 1:
        return given
    named = Path("runs") / given
    return named if named.is_dir() else given


def listing(folder: Path) -> str:
    """The command that lists the runs in a folder, or in ``runs/`` where a run was named without one.

    >>> listing(Path("old")), listing(Path("."))
    ('shardwright runs old', 'shardwright runs')
    """
    return "shardwright runs" if folder == Path(".") else f"shardwright runs {folder}"


def is_plan(path: Path) -> bool:
    """Whether a plan is meant, and no run: a file, or a folder in which no step was recorded."""
    if path.is_dir():
        return (path / "plan.json").exists() and not (path / "metrics.jsonl").exists()
    return path.exists() or path.suffix == ".json"


def read_plan(path: Path) -> "Plan":
    """The plan of a file, or of a run."""
    from shardwright.plan import Plan

    file = path / "plan.json"
    if path.is_dir() and not file.exists():
        raise PlanError(
            f"{path} is a folder without a plan.json. A run writes it after its first step, "
            "when it has more than one stage. Name a run folder that has one, or a plan file."
        )
    return Plan.read(file if path.is_dir() else path)
