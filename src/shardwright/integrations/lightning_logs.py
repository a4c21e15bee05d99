"""What the microbatches of a LightningModule log by ``self.log``."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import UsageError

__all__ = ["log_of_microbatch", "options_of_logs"]

_logged: ContextVar[dict[str, Tensor]] = ContextVar("logged")
"""What the microbatch that is running has logged: each is a coroutine, with a context of its own."""


@contextmanager
def log_of_microbatch() -> Iterator[dict[str, Tensor]]:
    """Yields what the microbatch that runs inside logs, by name."""
    logged: dict[str, Tensor] = {}
    token = _logged.set(logged)
    try:
        yield logged
    finally:
        with suppress(ValueError):  # a microbatch that is ended from outside is closed in another context
            _logged.reset(token)


@contextmanager
def options_of_logs(module: Any) -> Iterator[dict[str, dict[str, Any]]]:
    """Has ``self.log`` of a module note what microbatches tell it."""
    options: dict[str, dict[str, Any]] = {}

    def log(name: str, value: Any, **given: Any) -> None:
        if not isinstance(value, Tensor | int | float):
            raise UsageError(
                f'self.log("{name}", ...) was given a {type(value).__name__}, which would see one '
                "microbatch after the other, on one rank. Log a tensor with one number, or update "
                "metrics in on_train_batch_end or on_validation_batch_end, from what the step returns."
            )
        options[name] = given
        _logged.get()[name] = (value if isinstance(value, Tensor) else torch.tensor(float(value))).detach()

    module.log = log
    try:
        yield options
    finally:
        del module.log
