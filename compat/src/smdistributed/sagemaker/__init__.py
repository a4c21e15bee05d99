"""The names of SMP v2, ``import torch.sagemaker as tsm``, where torch has none: over PyTorch's own FSDP.

::

    python -m smdistributed.sagemaker install       from now on ``import torch.sagemaker`` works
    python -m smdistributed.sagemaker uninstall

torch is a package of somebody else, so a finder answers for this one name in it. It comes last: a real
`torch.sagemaker` is found before it. Importing this module costs an interpreter nothing but importlib.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from smdistributed.installing import path_of, remove

__all__ = ["install", "provide", "uninstall"]

_ROOT = "torch.sagemaker"
_FILE = "shardwright-torch-sagemaker.pth"
_AT_START = "import smdistributed.sagemaker; smdistributed.sagemaker.provide()\n"


def provide() -> None:
    """Makes ``import torch.sagemaker`` work in this process, where there is no real one."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def install() -> str:
    """Makes ``import torch.sagemaker`` work in this environment; gives a sentence that says what was done."""
    path = _path()
    path.write_text(_AT_START)
    return f"{path} was written: scripts of this environment can import torch.sagemaker."


def uninstall() -> str:
    """Takes back `install`; gives a sentence that says what was done."""
    return remove(_path())


def _path() -> Path:
    return path_of(_FILE)


class _Finder(MetaPathFinder, Loader):
    """Finds `torch.sagemaker` and the modules in it, which `names` lists; it refuses the others by name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _ROOT and not fullname.startswith(f"{_ROOT}."):
            return None
        root = sys.modules.get(_ROOT)
        if root is not None and getattr(root.__spec__, "loader", None) is not self:
            return None  # a real one, which has its own modules or lacks them
        names = importlib.import_module("smdistributed.sagemaker.names")
        is_package = names.check_module(fullname)
        return ModuleSpec(fullname, self, origin=__file__, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        importlib.import_module("smdistributed.sagemaker.names").fill(module)
