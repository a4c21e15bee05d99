"""The profiler of PyTorch."""

from torch.autograd import profiler

__all__ = ["is_profiled"]


def is_profiled() -> bool:
    """Whether a profiler of PyTorch records in this process.

    A range of `torch.profiler.record_function` takes microseconds where none does, and this a lookup.
    """
    return profiler._is_profiler_enabled
