"""Packs a script's folder, small enough for a manifest."""

import base64
import io
import os
import tarfile
from pathlib import Path

from shardwright.errors import ConfigError
from shardwright.quantities import format_bytes

__all__ = ["pack"]

_PART = 96 * 1024
"""Characters: Linux takes no variable of more than 128 KiB."""

_MOST = 9 * _PART
"""Kubernetes takes no object of more than 1 MiB."""

_LEFT_OUT = frozenset({"__pycache__", ".git", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", "runs"})


def pack(folder: Path, *, without: Path) -> list[str]:
    """The files of a folder as a compressed archive in base64, in parts; hidden files are left out."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for path in _files(folder, without):
            tar.add(path, arcname=str(path.relative_to(folder)), recursive=False)
            if archive.tell() > _MOST:
                break
    text = base64.b64encode(archive.getvalue()).decode()
    if len(text) > _MOST:
        raise ConfigError(
            f"source_dir {folder} is too big to go with the job: packed it takes more than "
            f"{format_bytes(_MOST * 3 // 4)}. Keep data out of it; or put it into the image, or on a "
            'volume, and say where it is there: Kubernetes(code="/workspace").'
        )
    return [text[start : start + _PART] for start in range(0, len(text), _PART)]


def _files(folder: Path, without: Path) -> list[Path]:
    found: list[Path] = []
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if name not in _LEFT_OUT and not name.startswith(".") and Path(place, name) != without
        )
        found += [Path(place, name) for name in sorted(files) if not name.startswith(".")]
    return found
