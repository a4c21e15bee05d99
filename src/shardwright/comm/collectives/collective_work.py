"""The handle of a running collective, for torch.distributed to wait on."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

__all__ = ["CollectiveWork"]

_Work: Any = dist.Work


class CollectiveWork(_Work):  # type: ignore[misc]
    """A collective that a thread does; FSDP2 waits for work of this base class only."""

    def __init__(self, future: "Future[list[Tensor]]"):
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the end; raises the collective's error. The group's own timeout counts."""
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Whether it is done, or has failed."""
        return self._future.done()

    def is_success(self) -> bool:
        """Whether it is done and has not failed."""
        return self._future.done() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The error that it raised, or None."""
        try:
            self._future.wait()
        except BaseException as error:
            return error
        return None

    def result(self) -> list[Tensor]:
        return self._future.wait()

    def get_future(self) -> "Future[list[Tensor]]":
        """A future that C++ can read: an exception of Python is an error of it, not its value."""
        return self._future.then(lambda done: done.value())
