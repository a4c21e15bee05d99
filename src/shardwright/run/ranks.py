"""The rank of this process in each group."""

import os

import torch
import torch.distributed as dist

from shardwright.comm.joining.process_group import init_process_group
from shardwright.comm.launchers import detect
from shardwright.run.context import context
from shardwright.run.joint_calls import meet


def rank() -> int:
    """This rank among all, from 0."""
    return context().rank


def size() -> int:
    """Number of ranks."""
    return context().mesh.world_size


def device() -> torch.device:
    """The device on which this rank computes: a GPU of its own, or the CPU.

    `DistributedModel` and step functions move model and batch there by themselves.

    Example:
        >>> import torch, shardwright.torch as sw
        >>> sw.init({"run_dir": "off"})
        >>> weights = torch.ones(3, device=sw.device())
        >>> sw.shutdown()
    """
    return context().device


def local_rank() -> int:
    """This rank on its host, from 0."""
    return context().local_rank


def local_size() -> int:
    """Ranks on this host."""
    return context().local_size


def dp_rank() -> int:
    """Position among the ranks of a stage in all replicas, from 0, as in SMP v1.

    It also counts the ranks that share layers, which work on one batch: data is read by `rdp_rank`.
    """
    return context().mesh.group_rank("dp", context().rank)


def dp_size() -> int:
    """Replicas times the ranks that share layers (tensor, context, expert degree), as in SMP v1."""
    return context().mesh.group_size("dp")


def rdp_rank() -> int:
    """The replica of this rank, from 0: the shard of the data to read."""
    return context().mesh.group_rank("rdp", context().rank)


def rdp_size() -> int:
    """Number of replicas: into how many shards the data is cut."""
    return context().mesh.group_size("rdp")


def pp_rank() -> int:
    """Position in the pipeline, from 0."""
    return context().mesh.group_rank("pp", context().rank)


def pp_size() -> int:
    """Ranks in the pipeline."""
    return context().mesh.group_size("pp")


def tp_rank() -> int:
    """Position among the ranks that share every layer of a stage, from 0."""
    return context().mesh.group_rank("tp", context().rank)


def tp_size() -> int:
    """Ranks that share every layer of a stage."""
    return context().mesh.group_size("tp")


def mp_rank() -> int:
    """Position in the replica, from 0."""
    return context().mesh.group_rank("mp", context().rank)


def mp_size() -> int:
    """Ranks that share one replica."""
    return context().mesh.group_size("mp")


def get_mp_group() -> tuple[int, ...]:
    """World ranks of this replica."""
    return context().mesh.group("mp", context().rank)


def get_dp_group() -> tuple[int, ...]:
    """World ranks of this pipeline stage, one a replica."""
    return context().mesh.group("dp", context().rank)


def get_dp_process_group() -> dist.ProcessGroup | None:
    """The process group of this pipeline stage, one rank a replica; a rank alone gets one of itself.

    What a step returns is on every rank of a replica. Sums over this group count each replica once: give it
    to ``dist.all_reduce(correct, group=...)``, or to metrics as their ``process_group``.
    """
    current = context()
    if current.mesh.world_size == 1 and not dist.is_initialized():
        backend, timeout_s = current.config.ddp_dist_backend, current.config.timeout_s
        init_process_group(detect(os.environ), backend=backend, timeout_s=timeout_s, device=current.device)
    return current.group_of_replicas() or dist.group.WORLD


def barrier() -> None:
    """Waits for all ranks; call it on all of them."""
    context()
    meet("sw.barrier()")
