"""Tells the script's own code from Python's, installed packages' and this library's."""

import os
import site
import sys
import sysconfig

import shardwright

__all__ = ["is_script_class", "is_script_file"]

_FOLDERS = {
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *site.getsitepackages(),
    site.getusersitepackages(),
    os.path.dirname(shardwright.__file__),
}
_NOT_THE_SCRIPTS = (*(f"{folder}{os.sep}" for folder in _FOLDERS), "<frozen ")
_OURS = ("shardwright.", "smdistributed.")


def is_script_file(path: str) -> bool:
    """Whether a file of code is the script's own, or one that it brings along."""
    return not path.startswith(_NOT_THE_SCRIPTS)


def is_script_class(kind: type) -> bool:
    """Whether a class is of such a file, or of none: of a notebook, or of a module in C."""
    if f"{kind.__module__}.".startswith(_OURS) or kind.__module__ == "builtins":
        return False
    path = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return path is None or is_script_file(path)
