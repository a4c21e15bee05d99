"""Creates a folder with all its content, or not at all."""

import contextlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwright.checkpoint.disk import Disk
from shardwright.errors import CheckpointError
from shardwright.quantities import counted

__all__ = ["fresh_folder", "refuse_filled"]


@contextmanager
def fresh_folder(target: Path, *, disk: Disk) -> Iterator[Path]:
    """Gives a temporary folder beside a folder, whose name it gets when all was written."""
    target = target.resolve()
    refuse_filled(target)
    draft = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
    try:
        disk.make_folder(draft)
        yield draft
        disk.sync_folder(draft)
        disk.rename(draft, target)
    except OSError as error:
        raise CheckpointError(
            f"{target} cannot be written: {error.strerror or error}. Nothing was left there. Give a folder "
            "on a disk that can be written and has room."
        ) from error
    finally:
        if draft.is_dir():
            with contextlib.suppress(OSError):
                disk.remove_folder(draft)


def refuse_filled(target: Path) -> None:
    """Refuses to write over anything."""
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(f"{target} is there already, and is no folder. Give the name of a new folder.")
    found = sorted(path.name for path in target.iterdir())
    if found:
        raise CheckpointError(
            f"{target} is there already, with {counted(len(found), 'file')} ({', '.join(found[:3])}"
            f"{', ...' if len(found) > 3 else ''}). Nothing is written over: give the name of a new folder."
        )
