"""Finds a run by its name, as `shardwright runs` lists it, where a path is asked for."""

from pathlib import Path

__all__ = ["listing", "run_path"]


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
