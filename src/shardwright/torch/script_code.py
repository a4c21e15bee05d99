"""Which code is the script's own, and not that of Python, of installed packages, or of this library."""

import os
import sys
import sysconfig

import shardwright

__all__ = ["is_script_class", "is_script_file"]

_PATHS = ("stdlib", "platstdlib", "purelib", "platlib")
_INSTALLED = tuple({f"{sysconfig.get_path(name)}{os.sep}" for name in _PATHS})
_NOT_THE_SCRIPTS = (*_INSTALLED, f"{os.path.dirname(shardwright.__file__)}{os.sep}", "<frozen ")
_OURS = ("shardwright.", "smdistributed.")


def is_script_file(path: str) -> bool:
    """Whether a file of code is the script's own, or one that it brings along.

    Args:
        path: as code objects name it.
    """
    return not path.startswith(_NOT_THE_SCRIPTS)


def is_script_class(kind: type) -> bool:
    """Whether a class is of such a file, or was made where there is no file.

    Args:
        kind: the class.
    """
    if f"{kind.__module__}.".startswith(_OURS) or kind.__module__ == "builtins":
        return False
    path = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return path is None or is_script_file(path)
