"""Writes a report, with the plotting library packed inside."""

import base64
import gzip
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from shardwright.errors import UsageError
from shardwright.files import replace_file
from shardwright.observe.report.gathered.data import gather
from shardwright.observe.report.pages.page import render_page
from shardwright.printable import printable

__all__ = ["INSTALL", "check_plotly", "packed_library", "write_report"]

INSTALL = "pip install 'shardwright[report]'"

# Level 9 saves 3 % of the file for three times the seconds.
_LEVEL = 6


def check_plotly() -> None:
    """Refuses to go on where plotly is not installed."""
    if find_spec("plotly") is None:
        raise UsageError(
            f"a report needs the package plotly, which is not installed. Run: {INSTALL}. "
            "Without it: shardwright report RUN --json, or shardwright explain RUN."
        )


@cache
def packed_library() -> str:
    """plotly.js, compressed with gzip, in base64.

    It is read from the package and not through ``plotly.offline``, whose import takes longer than the rest.
    """
    check_plotly()
    spec = find_spec("plotly")
    assert spec is not None
    for folder in spec.submodule_search_locations or ():
        file = Path(folder, "package_data", "plotly.min.js")
        if file.is_file():
            packed = gzip.compress(file.read_bytes(), compresslevel=_LEVEL, mtime=0)
            return base64.b64encode(packed).decode("ascii")
    raise UsageError(
        f"the installed plotly has no package_data/plotly.min.js, which version 7 has. Run: {INSTALL}"
    )


def write_report(path: Path, file: Path) -> Path:
    """Writes the report of a run folder or a plan file, whole or not at all; returns `file`."""
    return _write(render_page(gather(path), library=packed_library()), file)


def _write(page: str, file: Path) -> Path:
    try:
        replace_file(file, page)
    except OSError as error:
        raise UsageError(
            f"the report cannot be written to {printable(str(file))}: {error.strerror}. Name another file "
            "with -o."
        ) from error
    return file
