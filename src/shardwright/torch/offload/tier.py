"""A tier of memory below a device's own, where what is kept for a backward waits."""

from typing import Any, Protocol

from torch import Tensor

__all__ = ["Copy", "Tier"]


class Copy(Protocol):
    """One copy under way, to the tier or back."""

    @property
    def is_done(self) -> bool:
        """Whether the bytes are where they go; it does not wait."""
        ...

    def wait(self) -> None:
        """Has what computes from now on find the copy done."""
        ...

    def skip(self) -> bool:
        """Has it left out, if it has not begun; whether it will be."""
        ...

    def seconds(self) -> tuple[float, float]:
        """When it began and ended, on `time.perf_counter`; it has been waited for."""
        ...


class Tier(Protocol):
    """Takes the bytes of storages and gives them back. Copies are made in the order of the calls."""

    def reserve(self, num_bytes: int) -> None:
        """Takes room for so many bytes at once, where that can be told before anything is written."""
        ...

    def write(self, memory: Tensor) -> tuple[Any, Copy]:
        """Starts to copy bytes (a tensor of ``uint8``) to the tier; gives their place, and the copy.

        Nobody may change them, or let go of them, before the copy is done.
        """
        ...

    def read(self, place: Any, memory: Tensor) -> Copy:
        """Starts to copy the bytes of a place into memory of the device."""
        ...

    def free(self, place: Any) -> None:
        """The bytes of a place are not needed any more; a copy that reads them has been waited for."""
        ...

    def close(self) -> None:
        """Gives everything back; copies under way are waited for."""
        ...
