"""Treats `torch.inference_mode`, around and inside step functions, as `torch.no_grad`.

Inference tensors have no version counters, which a trace needs to see changes in place. The mode also belongs
to the thread, while a step function may be suspended midway. Results are the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["inference_mode_as_no_grad"]


@contextmanager
def inference_mode_as_no_grad() -> Iterator[None]:
    """Leaves inference mode, and has code inside enter `torch.no_grad` in its place."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad(), _replaced():
            yield
    else:
        with _replaced():
            yield


@contextmanager
def _replaced() -> Iterator[None]:
    kind: Any = torch.inference_mode
    enter, leave = kind.__enter__, kind.__exit__
    kind.__enter__, kind.__exit__ = _enter, _leave
    try:
        yield
    finally:
        kind.__enter__, kind.__exit__ = enter, leave


def _enter(self: Any) -> None:
    self._grad_enabled_before = torch.is_grad_enabled()
    torch.set_grad_enabled(not self.mode)


def _leave(self: Any, *exc_info: object) -> None:
    torch.set_grad_enabled(self._grad_enabled_before)
