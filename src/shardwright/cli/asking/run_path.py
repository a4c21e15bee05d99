"""Finds a run by its name, as `shardwright runs` lists it, where a path is asked for; and the plan in it."""

from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.checkpoint.disk import MANIFEST
from shardwright.checkpoint.folder import CheckpointFolder, refuse_one_checkpoint, refuse_other_name
from shardwright.errors import PlanError, UsageError

if TYPE_CHECKING:
    from shardwright.plan import Plan


def run_path(given: Path | None) -> Path | None:
    """The path; if there is nothing, and ``runs/`` has a run of this name, that of the run."""
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
    from shardwright.plan import Plan

    file = path / "plan.json"
    if path.is_dir() and not file.exists():
        raise PlanError(
            f"{path} is a folder without a plan.json. A run writes it after its first step, "
            "when it has more than one stage. Name a run folder that has one, or a plan file."
        )
    return Plan.read(file if path.is_dir() else path)


def folder_of(path: Path) -> Path:
    """The folder of checkpoints in that of a run, or the folder itself."""
    path = run_path(path) or path
    inside = path / "checkpoints"
    return inside if inside.is_dir() else path


def checkpoint_folder(path: Path) -> CheckpointFolder:
    chosen = folder_of(path)
    refuse_one_checkpoint(chosen)
    if not chosen.is_dir():
        raise UsageError(f"there is no folder {path}. Give the folder of a run, or of its checkpoints.")
    return CheckpointFolder(chosen)


def named_checkpoint(path: Path, name: str | None) -> tuple[CheckpointFolder, str | None]:
    """The folder of checkpoints that is meant, and the checkpoint: also where the path is one itself."""
    whole = path if path.name else path.absolute()  # "." has neither a name nor a folder around it
    if not (whole / MANIFEST).exists():
        return checkpoint_folder(path), name
    refuse_other_name(whole)
    if name not in (None, whole.name):
        raise UsageError(f"{path} is a checkpoint, and {name} is another one. Leave one of them out.")
    return CheckpointFolder(whole.parent), whole.name
