"""Tells whether a question comes from the script or from an installed package.

A few questions have one right answer for the script and another for PyTorch: in a script ``tensor.is_cuda``
decides whether a tensor has arrived, in PyTorch which kernel may work on it.
"""

import functools
import sys
import sysconfig
from pathlib import Path

import torch

__all__ = ["script_asks"]

_OWN_PACKAGES = ("shardwright", "smdistributed", "torch")


@functools.cache
def _installed_at() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found.add(str(Path(torch.__file__).parent.parent))
    found |= {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
    return tuple(f"{path}/" for path in sorted(found))


@functools.cache
def _is_installed(path: str, module: str) -> bool:
    return path.startswith(("<", *_installed_at())) or module.partition(".")[0] in _OWN_PACKAGES


def script_asks(depth: int = 2) -> bool:
    """Whether code of the script has called the function that asks."""
    frame = sys._getframe(depth)
    return not _is_installed(frame.f_code.co_filename, str(frame.f_globals.get("__name__", "")))
