"""Files of records, one JSON object a line."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

__all__ = ["JsonLines", "read_json_lines"]


class JsonLines:
    """Appends records to a file; each is there as soon as `append` returns.

    The file is made by the first record. A record that a killed process left unfinished is closed with a
    line break, so that it spoils no record but itself.

    Args:
        path: the file; its folder exists.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one line.

        Args:
            record: anything that `json` can write; what it cannot is written as text. Numbers that JSON does
                not have become the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which
                `float` reads.
        """
        line = json.dumps(_plain(record), allow_nan=False, default=str)
        if self._file is None:
            self._file = _open(self.path)
        self._file.write(line + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file; a later `append` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_json_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a file, in order; without lines that a killed process left unfinished."""
    records = []
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _open(path: Path) -> TextIO:
    unfinished = _ends_inside_a_line(path)
    file = path.open("a", encoding="utf-8")
    if unfinished:
        file.write("\n")
    return file


def _ends_inside_a_line(path: Path) -> bool:
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
