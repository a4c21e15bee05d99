"""Processes that die at a chosen moment."""

import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

__all__ = ["Counted", "die", "in_child"]


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


class Counted:
    """Does something before an operation on the disk."""

    def __init__(self, at: int | None, action: Callable[[], None]):
        self.operations: list[tuple[str, str]] = []
        self._at = at
        self._action = action

    def __call__(self, operation: str, path: Path) -> None:
        if len(self.operations) == self._at:
            self._action()
        self.operations.append((operation, path.name.partition(".tmp-")[0]))

    def places(self) -> list[int]:
        """Each operation, and the last one of the writes to a file: it has a part of its content."""
        known = [*self.operations, None]
        return [i for i, each in enumerate(self.operations) if each != known[i + 1]]
