"""Profilers: record the CPU, where everything happens."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import profiler
from torch.profiler import ProfilerActivity

from shardwright.cpu_mode.devices import is_cuda

__all__ = ["put_in_force"]


def put_in_force() -> None:
    """Has profilers leave out what only a GPU could tell."""
    whole: Any = torch.profiler.profile
    whole.__init__ = _without_activity(whole.__init__)
    of_autograd: Any = profiler.profile
    of_autograd.__init__ = _without_device(of_autograd.__init__)
    ranges: Any = profiler.emit_nvtx
    ranges.__enter__ = lambda self: self
    ranges.__exit__ = lambda self, *exc_info: False


def _without_activity(init: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        kwargs.pop("use_cuda", None)
        if kwargs.get("activities") is not None:
            kwargs["activities"] = _on_cpu(kwargs["activities"])
        init(self, *args, **kwargs)

    return __init__


def _on_cpu(activities: Iterable[Any]) -> list[Any]:
    """The activities without those of CUDA; that of the CPU where none is left."""
    cuda = ProfilerActivity.CUDA
    left: list[Any] = []
    for activity in activities:
        if isinstance(activity, dict):
            activity = {kind: names for kind, names in activity.items() if kind != cuda}
        if activity not in ({}, cuda):
            left.append(activity)
    return left or [ProfilerActivity.CPU]


def _without_device(init: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        kwargs.pop("use_cuda", None)
        if is_cuda(kwargs.get("use_device")):
            del kwargs["use_device"]
            kwargs["use_cpu"] = True
        init(self, *args, **kwargs)

    return __init__
