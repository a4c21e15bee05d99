"""Chooses the folder of the file that activations are offloaded to."""

import logging
import tempfile
from pathlib import Path

from shardwright.config import Config

__all__ = ["disk_folder", "is_in_memory"]

log = logging.getLogger(__name__)

_IN_MEMORY = frozenset(("tmpfs", "ramfs", "devtmpfs"))
_MOUNTS = Path("/proc/self/mountinfo")


def disk_folder(config: Config, *, warns: bool) -> Path:
    """The folder that the settings name, or that of temporary files, or of runs if only that is on a disk."""
    choices = [Path(tempfile.gettempdir())]
    if config.run_dir != "off":
        choices.append(Path(config.run_dir))
    if config.offload_dir is not None:
        choices = [Path(config.offload_dir)]
    found = next((folder for folder in choices if not is_in_memory(folder)), None)
    if found is None and warns:
        log.warning(
            "activations are offloaded to %s, which is in memory itself (tmpfs): that frees none. Set "
            "offload_dir to a folder on a disk.",
            choices[0],
        )
    return (found or choices[0]).absolute()


def is_in_memory(folder: Path) -> bool:
    """Whether what lies in a folder takes memory; False where the system does not tell."""
    try:
        table = _MOUNTS.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    path = folder.resolve()
    depth, kind = -1, ""
    for line in table.splitlines():
        fields, _, rest = line.partition(" - ")
        point = Path(_unescaped(fields.split()[4]))
        # Of several file systems at one place, the last one is seen.
        if path.is_relative_to(point) and len(point.parts) >= depth:
            depth, kind = len(point.parts), rest.split()[0]
    return kind in _IN_MEMORY


def _unescaped(text: str) -> str:
    """A path as the kernel writes it: blanks and the like as octal numbers."""
    return text.encode("latin-1", "replace").decode("unicode_escape")
