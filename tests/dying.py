"""Processes that die at a chosen moment."""

import os
import signal
import traceback
from collections.abc import Callable

__all__ = ["die", "in_child"]


def die() -> None:
    """Ends this process as a loss of power would: nothing is cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(run: Callable[[], None]) -> int:
    """Runs something in a process of its own; the signal that ended it, or 0."""
    child = os.fork()
    if child == 0:
        try:
            run()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
