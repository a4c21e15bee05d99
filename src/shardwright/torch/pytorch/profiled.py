"""Names what runs for `torch.profiler`; costs nothing where none is looking."""

from contextlib import AbstractContextManager, nullcontext

from torch.profiler import record_function

from shardwright.torch._private import is_profiled

__all__ = ["range_named"]


def range_named(name: object) -> AbstractContextManager[object]:
    """A range ``shardwright NAME`` in the profile, if one is being recorded."""
    return record_function(f"shardwright {name}") if is_profiled() else nullcontext()
