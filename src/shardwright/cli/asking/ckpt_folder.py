"""Resolves a path to a folder of checkpoints, and to a checkpoint in it."""

from pathlib import Path

from shardwright.checkpoint.folder import COMMITTED, CheckpointFolder, refuse_one_checkpoint
from shardwright.checkpoint.manifest import MANIFEST
from shardwright.cli.asking.run_path import run_path
from shardwright.errors import UsageError

__all__ = ["checkpoint_folder", "folder_of", "named_checkpoint"]


def folder_of(path: Path) -> Path:
    """The folder of checkpoints in that of a run, or the folder itself."""
    path = run_path(path) or path
    inside = path / "checkpoints"
    return inside if inside.is_dir() else path


def checkpoint_folder(path: Path) -> CheckpointFolder:
    """The folder of checkpoints that is meant.

    Raises:
        UsageError: it is not there, or is one checkpoint.
    """
    chosen = folder_of(path)
    refuse_one_checkpoint(chosen)
    if not chosen.is_dir():
        raise UsageError(f"there is no folder {path}. Give the folder of a run, or of its checkpoints.")
    return CheckpointFolder(chosen)


def named_checkpoint(path: Path, name: str | None) -> tuple[CheckpointFolder, str | None]:
    """The folder of checkpoints that is meant, and the checkpoint: also where the path is one itself.

    Raises:
        UsageError: it is not there, or two different checkpoints are named.
    """
    whole = path if path.name else path.absolute()  # "." has neither a name nor a folder around it
    if not ((whole / MANIFEST).exists() and (whole.parent / COMMITTED).exists()):
        return checkpoint_folder(path), name
    if name not in (None, whole.name):
        raise UsageError(f"{path} is a checkpoint, and {name} is another one. Leave one of them out.")
    return CheckpointFolder(whole.parent), whole.name
