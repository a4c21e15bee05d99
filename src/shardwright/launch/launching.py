"""Launches the ranks of this host."""

import os
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from shardwright.launch.placement import may_have_gpus
from shardwright.launch.ranks.request import LaunchRequest
from shardwright.launch.ranks.standby import standby


def launch(request: LaunchRequest, *, report: Callable[[str], None], verbose: bool = False) -> int:
    """Runs a script on ranks of this host; returns the exit code of the launcher.

    Args:
        report: is told what happens, and how it ended.
        verbose: leaves messages of torchelastic as they are.

    Raises:
        LaunchError: they cannot be started.
    """
    os.environ.update(request.worker_environ(os.environ))
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    # Modules may be such that replace names of libraries before a script takes them. With GPUs, that is not
    # tried yet.
    forks = sys.platform == "linux" and not may_have_gpus() and request.script[0].endswith(".py")
    with tempfile.TemporaryDirectory(prefix="shardwright-run-") as name:
        folder = Path(name)
        with standby(folder, request.script[0]) if forks else nullcontext():
            # PyTorch, beside the import of the standby. It would pass over a Ctrl-C, which waits until then.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                from shardwright.launch.ranks.agent import run
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return run(request, folder, report=report, verbose=verbose)
