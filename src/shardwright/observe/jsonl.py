"""Record files with one JSON object per line."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from shardwright.errors import UsageError
from shardwright.files import DocumentError, UserFile, open_to_append, parse_json

__all__ = ["JsonLines", "Records", "read_json_lines"]

_MOST_BYTES = 2 * 2**30  # millions of steps


class JsonLines:
    """Appends records to a file; each is in the file as soon as `append` returns.

    The file is made by the first record. A record that a killed process left unfinished is closed with a
    line break, so that it spoils no record but itself.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: BinaryIO | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one line."""
        line = json.dumps(_plain(record), allow_nan=False, default=str)
        if self._file is None:
            self._file = _open(self.path)
        self._file.write(f"{line}\n".encode())
        self._file.flush()

    def close(self) -> None:
        """Closes the file; a later `append` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


class Records(list[dict[str, Any]]):
    """The records of a file, in order.

    Attributes:
        left_out: one sentence about lines that are no record; empty where all are. The last line does not
            count: the run that writes it goes on, or was killed.
    """

    left_out: str = ""


def read_json_lines(path: str | os.PathLike[str]) -> Records:
    """The records of a file."""
    file = UserFile(path, what="", error=UsageError, most_bytes=_MOST_BYTES)
    records, bad, first = Records(), 0, ""
    lines = enumerate(file.read_lines(), start=1)
    number, line = next(lines, (0, b""))
    while number:
        following = next(lines, (0, b""))
        try:
            record = parse_json(line.decode(errors="replace"), free_text=True)
            if not isinstance(record, dict):
                raise DocumentError("it is no object")
            records.append(record)
        except DocumentError as error:
            if line.strip() and following[0]:
                bad, first = bad + 1, first or f"line {number} {error.predicate}"
        number, line = following
    if bad:
        more = "" if bad == 1 else f", and {bad - 1} others are none either"
        records.left_out = f"{file}: {first}{more}. Left out."
    return records


def _open(path: Path) -> BinaryIO:
    unfinished = _ends_inside_a_line(path)
    file = open_to_append(path)
    if unfinished:
        file.write(b"\n")
    return file


def _ends_inside_a_line(path: Path) -> bool:
    if not path.is_file() or not path.stat().st_size:
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
