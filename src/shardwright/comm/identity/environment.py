"""Reads the rank of this process from the variables that launchers set.

The first source that is present wins; `LaunchEnvironment.source` names it:

1. what the caller passes,
2. ``SHARDWRIGHT_RANK``, ``SHARDWRIGHT_WORLD_SIZE``, ...,
3. torchrun and its relatives: ``RANK``, ``WORLD_SIZE``, ...; then ``PET_NODE_RANK``, ``PET_NNODES``, as
   Kubeflow sets them, for one process a node,
4. Slurm's srun: ``SLURM_PROCID``, ``SLURM_NTASKS``, ...,
5. Open MPI, then MPICH and Intel MPI: ``OMPI_COMM_WORLD_RANK``, ``PMI_RANK``, ...,
6. an indexed Kubernetes job: ``JOB_COMPLETION_INDEX`` with ``WORLD_SIZE``,
7. SageMaker: ``SM_HOSTS``, ``SM_CURRENT_HOST``,
8. nothing: a single process.
"""

from collections.abc import Mapping

from shardwright.comm.identity import launchers
from shardwright.comm.identity.launch_environment import LaunchEnvironment
from shardwright.comm.identity.variables import Variables

__all__ = ["LaunchEnvironment", "detect"]

_READERS = (
    launchers.from_own,
    launchers.from_torchrun,
    launchers.from_torchrun_defaults,
    launchers.from_slurm,
    launchers.from_open_mpi,
    launchers.from_pmi,
    launchers.from_kubernetes,
    launchers.from_sagemaker,
)


def detect(
    environ: Mapping[str, str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
) -> LaunchEnvironment:
    """Reads where this process stands; see the top of this file for the order.

    >>> found = detect({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    >>> found.rank, found.local_rank, found.source
    (1, 1, 'RANK and WORLD_SIZE')
    >>> str(detect({}))
    'rank 0 of 1 (from a single process)'
    """
    given = {
        "rank": rank,
        "world_size": world_size,
        "local_rank": local_rank,
        "local_world_size": local_world_size,
        "master_addr": master_addr,
        "master_port": master_port,
    }
    arguments = Variables({name: str(value) for name, value in given.items() if value is not None})
    found = launchers.from_arguments(arguments)
    variables = Variables(environ)
    for reader in _READERS:
        found = found or reader(variables)
    return found or launchers.from_single_process(variables)
