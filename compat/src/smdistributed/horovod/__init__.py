"""The names of Horovod for scripts that import it, where there is no Horovod: a small part, over Shardwright.

::

    python -m smdistributed.horovod install       from now on ``import horovod.tensorflow`` works
    python -m smdistributed.horovod uninstall

A folder with a package `horovod` comes last on the path of imports, so that a real Horovod is found before
it, whichever was installed first. ``import smdistributed.modelparallel.tensorflow`` does the same for its own
process: the original brought Horovod along.
"""

import importlib.util
import sys
from pathlib import Path

from smdistributed.installing import path_of, remove

__all__ = ["install", "is_ours", "provide", "uninstall"]

_NAMES = Path(__file__).parent / "names"
_FILE = "shardwright-horovod.pth"


def provide() -> None:
    """Makes ``import horovod`` work in this process, where there is no real one."""
    if str(_NAMES) not in sys.path:
        sys.path.append(str(_NAMES))


def is_ours() -> bool | None:
    """Whether ``import horovod`` gives this one; None where there is none."""
    spec = importlib.util.find_spec("horovod")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).is_relative_to(_NAMES)


def install() -> str:
    """Makes ``import horovod`` work in this environment; gives a sentence that says what was done."""
    if is_ours() is False:
        raise FileExistsError(
            "a real Horovod is installed in this environment, and scripts get that one. Nothing was changed."
        )
    path = _path()
    path.write_text(f"{_NAMES}\n")
    return f"{path} was written: scripts of this environment can import horovod."


def uninstall() -> str:
    """Takes back `install`; gives a sentence that says what was done."""
    return remove(_path())


def _path() -> Path:
    return path_of(_FILE)
