"""What `torch.compile` does with code, and did."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["compiler_is_used", "compiler_of", "put_compiler_stance"]


@functools.cache
def _stances() -> tuple[Callable[[Any], Any], Any]:
    from torch._dynamo.eval_frame import DynamoStance, _set_stance  # takes long to import

    return _set_stance, DynamoStance("force_eager")


def compiler_is_used() -> bool:
    """Whether anything of this process is to be compiled: the compiler notes the backend of each that is."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and any(each is not None for each in frames.cached_backends.values())


def put_compiler_stance(stance: Any) -> Any:
    """Tells `torch.compile` what to do with compiled code; gives back what it did before.

    `torch.compiler.set_stance` does the same by an object that is put back in the order of a stack only.
    """
    put, as_written = _stances()
    return put(as_written if stance is None else stance)


def compiler_of(compiled: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """Compiles other functions as this module or function was compiled; None if it was not.

    It has the backend and the options that were given to `torch.compile`.
    """
    own = vars(compiled).get("dynamo_ctx")
    if own is None and hasattr(compiled, "_torchdynamo_orig_callable"):
        own = inspect.getclosurevars(compiled).nonlocals.get("self")
    return own  # type: ignore[no-any-return]
