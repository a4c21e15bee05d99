"""Process groups, children of `multiprocessing` and profilers, on the CPU.

A spawned process unpickles its parent's preparation before it imports the script; that unpickling activates
CPU mode. Only children of a process in CPU mode get it.
"""

import functools
import re
from collections.abc import Callable, Iterable
from multiprocessing import spawn
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.profiler import ProfilerActivity

from shardwright.cpu_mode.tensors import is_cuda, put_all


def put_in_force() -> None:
    if not dist.is_available():
        return
    from torch.distributed import device_mesh, distributed_c10d

    core: Any = distributed_c10d
    meshes: Any = device_mesh
    groups = {
        "init_process_group": _made_by_gloo(core.init_process_group, position=0),
        "new_group": _made_by_gloo(core.new_group, position=2),
    }
    put_all(groups, dist, core)
    put_all({"init_device_mesh": _mesh_on_cpu(meshes.init_device_mesh, position=0)}, dist, meshes)
    meshes.DeviceMesh.__init__ = _mesh_on_cpu(meshes.DeviceMesh.__init__, position=1)
    # In the module alone: PyTorch's own code asks another name, and must not look for NCCL in vain.
    put_all({"is_nccl_available": lambda: True}, dist)


def backend_on_cpu(backend: Any) -> Any:
    """The name of a backend for tensors on the CPU.

    >>> backend_on_cpu("nccl"), backend_on_cpu("cpu:gloo,cuda:nccl"), backend_on_cpu("smddp")
    ('gloo', 'gloo', 'smddp')
    """
    if not isinstance(backend, str) or not re.search(r"\bnccl\b", backend.lower()):
        return backend
    by_device = dict(part.split(":") for part in backend.lower().split(",") if ":" in part)
    return by_device.get("cpu", "gloo")


def _made_by_gloo(make: Callable[..., Any], *, position: int) -> Callable[..., Any]:
    @functools.wraps(make)
    def translated(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], backend_on_cpu(args[position]), *args[position + 1 :])
        elif "backend" in kwargs:
            kwargs["backend"] = backend_on_cpu(kwargs["backend"])
        if is_cuda(kwargs.get("device_id")):
            del kwargs["device_id"]  # it binds a group to a GPU
        return make(*args, **kwargs)

    return translated


def _mesh_on_cpu(make: Callable[..., Any], *, position: int) -> Callable[..., Any]:
    @functools.wraps(make)
    def translated(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position and is_cuda(args[position]):
            args = (*args[:position], "cpu", *args[position + 1 :])
        elif is_cuda(kwargs.get("device_type")):
            kwargs["device_type"] = "cpu"
        return make(*args, **kwargs)

    return translated


def put_children_in_force(enable: Callable[..., None]) -> None:
    """Has processes that are spawned begin with CPU mode."""
    prepare: Any = spawn.get_preparation_data

    @functools.wraps(prepare)
    def with_cpu_mode(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**prepare(*args, **kwargs), "shardwright.cpu_mode": _Activation(enable)}

    spawn.get_preparation_data = with_cpu_mode


class _Activation:
    """Unpickling it puts CPU mode in force."""

    def __init__(self, enable: Callable[..., None]):
        self._enable = enable

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return functools.partial(self._enable, says_so=False), ()


def put_profilers_in_force() -> None:
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
