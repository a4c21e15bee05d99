"""The files of a training script: itself, its folder, and what it imports from elsewhere."""

import os
from pathlib import Path

from shardwright.errors import ConfigError

__all__ = ["import_folder", "locate_script"]


def locate_script(
    entry_point: str | os.PathLike[str], source_dir: str | os.PathLike[str] | None
) -> tuple[Path, str]:
    """The folder in which a script starts, and its path in it."""
    script = os.fspath(entry_point)
    if source_dir is None:
        path = Path(script).expanduser().absolute()
        folder = path.parent
    else:
        text = os.fspath(source_dir)
        if "://" in text or text.endswith((".tar.gz", ".tgz")):
            raise ConfigError(
                f"source_dir is {text}, but it must be a folder. Unpack it, and give the folder."
            )
        folder = Path(text).expanduser().absolute()
        if not folder.is_dir():
            raise ConfigError(f"source_dir is {text}, but there is no such folder (looked in {Path.cwd()}).")
        path = folder / script
    if not path.is_file():
        scripts = ", ".join(sorted(file.name for file in folder.glob("*.py"))[:10]) if folder.is_dir() else ""
        there = f" It has {scripts}." if scripts else ""
        raise ConfigError(
            f"entry_point is {script}, but there is no such file in {folder}.{there} Give the path of a "
            "script"
            f"{', relative to source_dir' if source_dir is not None else ''}."
        )
    if path.suffix != ".py":
        raise ConfigError(f"entry_point is {script}, but it must be a Python script (.py).")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"entry_point is {script}, which lies outside of source_dir {folder}. Give one in it."
        )
    return folder, str(path.relative_to(folder)) if path.is_relative_to(folder) else script


def import_folder(path: str | os.PathLike[str]) -> str:
    """The folder from which a dependency is imported by its name."""
    found = Path(path).expanduser().absolute()
    if not found.exists():
        raise ConfigError(f"dependencies have {os.fspath(path)}, but there is no such file or folder.")
    return str(found.parent)
