"""`torch.distributed`: NCCL groups become gloo groups, and device meshes are on the CPU."""

import functools
import re
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from shardwright.cpu_mode.devices import is_cuda
from shardwright.cpu_mode.replacement import put_all

__all__ = ["backend_on_cpu", "put_in_force"]


def put_in_force() -> None:
    """Replaces the functions."""
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
    """A function that makes groups."""

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
