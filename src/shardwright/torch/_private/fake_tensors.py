"""Tensors without data, and what raises where a result cannot be known without it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)

__all__ = [
    "FAKE_FAILURES",
    "FakeTensor",
    "FakeTensorMode",
    "UnsupportedOperatorException",
    "fake_failures_unlogged",
    "fake_mode_is_active",
    "new_fake_mode",
    "unset_fake_temporarily",
]

# Raised when an operation's result cannot be known without data.
FAKE_FAILURES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


@contextmanager
def fake_failures_unlogged() -> Iterator[None]:
    """Keeps fake tensors from logging what also is raised, with all frames inside PyTorch."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def new_fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes and no data; real tensors that turn up are converted."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_mode_is_active() -> bool:
    """Whether operations run on tensors without data."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
