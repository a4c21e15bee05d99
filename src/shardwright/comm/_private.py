"""Private parts of torch.distributed: each with its use and the torch versions it was tried on.

========================================  =========================================================  ========
name                                      what for                                                   tried on
========================================  =========================================================  ========
``ProcessGroup._register_backend``        gloo or NCCL for a group that torch.distributed does not   2.13
                                          know
``ProcessGroupNCCL.Options._timeout``,    as ``torch.distributed`` makes a group of NCCL             read in
``ProcessGroup._set_default_backend``,                                                               2.13
``_set_sequence_number_for_group``
``ProcessGroup``'s                        how many collectives a rank has begun in a group; gloo     2.13
``_get_sequence_number_for_group``        counts sends and receives, too
``_C._distributed_c10d._dump_nccl_``      what PyTorch's flight recorder has: JSON, not its pickle     read in
``trace_json``, ``_dump_fr_trace_json``   (of gloo: 2.13)                                              2.13
``distributed_c10d``'s                    the group of a name that another rank gives                2.13
``_resolve_process_group``
========================================  =========================================================  ========
"""

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from shardwright.errors import UsageError

DEVICE_VARIABLE = "SHARDWRIGHT_DEVICE"
"""``cpu`` keeps ranks on the CPU where there are GPUs; ``shardwright run --device cpu`` sets it."""


def uses_gpus(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ranks compute on GPUs: where PyTorch finds some, unless ``SHARDWRIGHT_DEVICE`` is ``cpu``.

    In CPU mode `torch.cuda.is_available` says yes to scripts: Shardwright's own code asks here.

    >>> uses_gpus({"SHARDWRIGHT_DEVICE": "cpu"})
    False
    """
    return environ.get(DEVICE_VARIABLE) != "cpu" and torch.cuda.is_available()


def gloo_group(store: Store, rank: int, num_ranks: int, *, timeout_s: float) -> dist.ProcessGroup:
    """A process group of gloo that torch.distributed does not know; collective over its ranks."""
    group = dist.ProcessGroup(store, rank, num_ranks)
    backend = dist.ProcessGroupGloo(store, rank, num_ranks, timedelta(seconds=timeout_s))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def recorded_collectives() -> bytes:
    """The last collectives by PyTorch's own flight recorder, as JSON; empty where it is off, or has none."""
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        found: bytes = b"" if dump is None else dump(True, False)
        if b'"entries"' in found:
            return found
    return b""


def has_nccl() -> bool:
    """Whether this build of PyTorch has NCCL, and this host a device for it."""
    return uses_gpus() and dist.is_nccl_available()


def nccl_group(store: Store, rank: int, num_ranks: int, *, timeout_s: float) -> dist.ProcessGroup:
    """A process group of NCCL that torch.distributed does not know."""
    if not has_nccl():
        true = "sees no GPU" if dist.is_nccl_available() else "was built without NCCL"
        raise UsageError(
            f"collectives on CUDA tensors need NCCL, but PyTorch {torch.__version__} {true}. Install "
            "PyTorch for the CUDA of this host (https://pytorch.org/get-started), or pass tensors on the CPU."
        )
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    backend = nccl(store, rank, num_ranks, options)
    backend._set_sequence_number_for_group()
    group = dist.ProcessGroup(store, rank, num_ranks)
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
    return group


def group_named(name: str) -> dist.ProcessGroup | None:
    """The process group with a name; None where this rank has none of it."""
    resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    try:
        group: dist.ProcessGroup = resolve(name)
    except RuntimeError:
        return None
    return group


def number_of_collectives(group: dist.ProcessGroup) -> int | None:
    """The number of collectives that this rank has begun in a group; None if the backend does not count."""
    count: Any = group._get_sequence_number_for_group  # type: ignore[attr-defined]
    try:
        return int(count())
    except RuntimeError:
        return None


def counts_messages(group: dist.ProcessGroup) -> bool:
    """Whether `number_of_collectives` has sends and receives in it."""
    return dist.get_backend(group) != "nccl"


# Names before torch 2.13, which warns of the old ones.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
