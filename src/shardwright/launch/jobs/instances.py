"""The GPU count of SageMaker's machine names: ``local``, ``local_gpu``, ``ml.p4d.24xlarge``.

An unknown name is no mistake: clouds have new machines every month.
"""

import os
import re
import sys
from pathlib import Path

from shardwright.cluster.named import node_kinds

__all__ = ["LOCAL", "LOCAL_GPU", "gpus_here", "gpus_of"]

LOCAL = "local"
"""This machine, without its GPUs."""

LOCAL_GPU = "local_gpu"
"""This machine, with its GPUs."""

# Those that the planner has no figures of; the rest is in shardwright.cluster.
_GPUS = {
    "p2.xlarge": 1,
    "p2.8xlarge": 8,
    "p2.16xlarge": 16,
    "p3.2xlarge": 1,
    "p3.8xlarge": 4,
    "p5.4xlarge": 1,
    "p5e.48xlarge": 8,
    "p5en.48xlarge": 8,
    "p6-b200.48xlarge": 8,
    "g4dn.12xlarge": 4,
    "g4dn.metal": 8,
    **{
        f"{family}.{size}": gpus
        for family in ("g5", "g6", "g6e")
        for size, gpus in (("12xlarge", 4), ("24xlarge", 4), ("48xlarge", 8))
    },
}
_ONE_GPU = re.compile(r"(g4dn|g5|g6|g6e)\.(\d*xlarge)")
_NO_GPU = re.compile(r"[cmrt]\d+\w*\.\w+")
_CONTROLS = ("/dev/kfd", "/dev/dxg")  # of AMD's GPUs, and of those under Windows


def gpus_of(instance_type: str) -> int | None:
    """GPUs of one machine of a kind; None where the kind is not known.

    >>> gpus_of("ml.p4d.24xlarge"), gpus_of("ml.g5.2xlarge"), gpus_of("ml.c5.xlarge"), gpus_of("ml.x9.huge")
    (8, 1, 0, None)
    """
    name = instance_type.lower().removeprefix("ml.")
    if name == LOCAL:
        return 0
    if name == LOCAL_GPU:
        return gpus_here()
    kind = node_kinds().get(name)
    if kind is not None:
        return 0 if kind.cores else kind.num_accelerators
    if name in _GPUS:
        return _GPUS[name]
    if _ONE_GPU.fullmatch(name):
        return 1
    return 0 if _NO_GPU.fullmatch(name) else None


def gpus_here() -> int:
    """GPUs of this machine that may be used; PyTorch is asked only where there may be some."""
    if os.environ.get("SHARDWRIGHT_DEVICE") == "cpu":
        return 0
    if not (any(Path("/dev").glob("nvidia[0-9]*")) or any(Path(path).exists() for path in _CONTROLS)):
        return 0 if sys.platform == "linux" else _gpus_of_torch()
    return _gpus_of_torch()


def _gpus_of_torch() -> int:
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count()
