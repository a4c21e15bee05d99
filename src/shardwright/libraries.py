"""The libraries that a script has imported, noted for a process that imports them ahead of its next start."""

import json
import os
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

LIBRARIES = "libraries"
"""The name of the file."""

LIBRARIES_VARIABLE = "SHARDWRIGHT_LIBRARIES"
"""Names the folder of the file to a rank that is to write it."""

_LEFT_OUT = (
    "__main__.",
    "lightning.",
    "lightning_fabric.",
    "pytorch_lightning.",
    "shardwright.integrations.",
)
_OWN = __name__.partition(".")[0]


def note_libraries(folder: Path) -> None:
    """Writes the modules of libraries in the order of their import, the search path, and changed variables.

    Modules of the script itself are left out, Lightning's and our integrations: what they do when they are
    imported may be meant for one rank.
    """
    places = tuple(
        os.path.realpath(sysconfig.get_path(each)) + os.sep
        for each in ("stdlib", "platstdlib", "purelib", "platlib")
    )
    names = [
        name
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == _OWN
        or os.path.realpath(getattr(module, "__file__", None) or "").startswith(places)
    ]
    names = [name for name in names if not f"{name}.".startswith(_LEFT_OUT)]
    noted = [names, sys.path, _changed_variables()]
    unfinished = folder / f"{LIBRARIES}.new"
    unfinished.touch(0o600)
    unfinished.write_text(json.dumps(noted))
    unfinished.replace(folder / LIBRARIES)


def read_libraries(file: Path) -> tuple[list[str], list[str], dict[str, str]]:
    """What `note_libraries` has written."""
    names, search_path, variables = json.loads(file.read_text())
    return names, search_path, variables


def starts_with(environ: Mapping[str, str]) -> None:
    """Says what the variables of a forked process are as its script begins."""
    _AT_START.update(environ)


_AT_START: dict[str, str] = {}


def _changed_variables() -> dict[str, str]:
    """Those that the script has set: libraries read some when they are imported."""
    first = _AT_START or {
        os.fsdecode(name): os.fsdecode(value)
        for entry in Path("/proc/self/environ").read_bytes().split(b"\0")
        for name, equals, value in (entry.partition(b"="),)
        if equals
    }
    return {name: value for name, value in os.environ.items() if first.get(name) != value}
