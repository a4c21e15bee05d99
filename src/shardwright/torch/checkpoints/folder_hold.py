"""The hold of a run on its folder of checkpoints: no other run saves there meanwhile."""

from pathlib import Path

from shardwright.checkpoint.folder import COMMITTED, refuse_one_checkpoint
from shardwright.errors import UsageError
from shardwright.observe.run_folder import hold, release

__all__ = ["hold_folder", "release_folder"]

_LOCK = ".lock"


def hold_folder(path: Path) -> Path:
    """Keeps other runs from saving in a folder, and makes it; on the first rank."""
    refuse_one_checkpoint(path)
    if (path / "checkpoints" / COMMITTED).exists() and not (path / COMMITTED).exists():
        raise UsageError(
            f"{path} is the folder of a run, whose checkpoints are in a folder in it: "
            f'sw.Checkpoints("{path / "checkpoints"}").'
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        holder = hold(path / _LOCK)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be a folder of checkpoints: {error.strerror}. Give one that can be written."
        ) from error
    if holder is not None:
        raise UsageError(
            f"another run saves its checkpoints in {path} ({holder}). Wait until it has ended, or give this "
            "one a folder of its own."
        )
    return path


def release_folder(path: Path) -> None:
    """Leaves the folder to others."""
    release(path / _LOCK)
