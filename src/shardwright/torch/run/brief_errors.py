"""Prints an error that all ranks have once: with its traceback on the first rank, in one line on the others.

`shardwright run` folds the texts of its ranks itself. Under torchrun, srun and mpirun a wrong setting would
print as many tracebacks as there are ranks.
"""

import os
import sys
import traceback
from types import TracebackType

from shardwright.errors import ShardwrightError

__all__ = ["be_brief"]


def be_brief() -> None:
    """Has all ranks but the first print errors of this library in one line, which says where they arose."""
    rank = next((os.environ[name] for name in _RANKS if os.environ.get(name)), "0")
    if rank == "0" or "SHARDWRIGHT_RUN_DIR" in os.environ or sys.excepthook is not sys.__excepthook__:
        return

    def hook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if isinstance(error, ShardwrightError) and error.__cause__ is None:
            sys.stderr.write(f"[rank {rank}] {_line_of(frames)}{kind.__name__}: {error}\n")
        else:
            sys.__excepthook__(kind, error, frames)

    sys.excepthook = hook


_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def _line_of(frames: TracebackType | None) -> str:
    """The innermost line of the script, and not of a library."""
    script = os.path.dirname(os.path.abspath(sys.argv[0]))
    for frame in reversed(traceback.extract_tb(frames)):
        file = os.path.abspath(frame.filename)
        if file.startswith(script + os.sep) and "site-packages" not in file:
            return f"{os.path.relpath(frame.filename, script)}:{frame.lineno}: "
    return ""
