"""What Horovod says of the processes: the same for every framework."""

from collections.abc import Callable
from typing import Any

from smdistributed.dataparallel import data_ranks as _ranks
from smdistributed.dataparallel.data_ranks import local_rank, local_size, rank, size

__all__ = [
    "allgather_object",
    "broadcast_object",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
]


def init(*args: Any, **kwargs: Any) -> None:
    """Joins all ranks that the launcher has started; beside ``smp.init``, which has done so, nothing happens.

    Args:
        args: communicators and sets of processes, which change nothing: all ranks take part. So do `kwargs`.
    """
    _ranks.join()


def shutdown() -> None:
    """Leaves the other ranks; a run of ``smp.init`` stays."""
    _ranks.leave()


def is_initialized() -> bool:
    """Whether the ranks have joined."""
    return _ranks.have_joined()


def cross_size() -> int:
    """Number of hosts, where all have as many ranks."""
    return -(-size() // local_size())


def cross_rank() -> int:
    """The number of this host."""
    return rank() // local_size()


def is_homogeneous() -> bool:
    """Whether all hosts have as many ranks."""
    return size() % local_size() == 0


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """The object of one rank, on all."""
    return _ranks.data_ranks().objects(obj if rank() == root_rank else None)[root_rank]


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """The objects of all ranks, by rank."""
    return _ranks.data_ranks().objects(obj)


def _says(answer: bool) -> Callable[..., bool]:
    return lambda *_: answer


# Collectives work without MPI, which may start the ranks and carries nothing, and without Horovod's own NCCL.
gloo_built = gloo_enabled = _says(True)
mpi_built = mpi_enabled = mpi_threads_supported = nccl_built = cuda_built = rocm_built = _says(False)
