"""Reads the rank of this process from the variables that its launcher set.

The first source that is present wins; `LaunchEnvironment.source` names it:

1. ``SHARDWRIGHT_RANK``, ``SHARDWRIGHT_WORLD_SIZE``, ...,
2. torchrun and its relatives: ``RANK``, ``WORLD_SIZE``, ...; then ``PET_NODE_RANK``, ``PET_NNODES``, as
   Kubeflow sets them, for one process a node,
3. Slurm's srun: ``SLURM_PROCID``, ``SLURM_NTASKS``, ...,
4. Open MPI, then MPICH and Intel MPI: ``OMPI_COMM_WORLD_RANK``, ``PMI_RANK``, ...,
5. an indexed Kubernetes job: ``JOB_COMPLETION_INDEX`` with ``WORLD_SIZE``,
6. SageMaker: ``SM_HOSTS``, ``SM_CURRENT_HOST``,
7. nothing: a single process.
"""

import json
import math
import re
import zlib
from collections.abc import Mapping

from shardwright.comm.launch_environment import LaunchEnvironment, Variables, expand_hosts
from shardwright.errors import LaunchError
from shardwright.quantities import MOST_NODES
from shardwright.text import shown

__all__ = [
    "LaunchEnvironment",
    "detect",
    "from_kubernetes",
    "from_open_mpi",
    "from_own",
    "from_pmi",
    "from_sagemaker",
    "from_single_process",
    "from_slurm",
    "from_torchrun",
    "from_torchrun_defaults",
]

_DEFAULT_PORT = 29500
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def from_own(variables: Variables) -> LaunchEnvironment | None:
    """``SHARDWRIGHT_RANK`` and ``SHARDWRIGHT_WORLD_SIZE``: somebody who knows better than the launcher."""
    if not variables.together("SHARDWRIGHT_RANK", "SHARDWRIGHT_WORLD_SIZE"):
        return None
    return _by_names(variables, source="SHARDWRIGHT_RANK", prefix="SHARDWRIGHT_")


def from_torchrun(variables: Variables) -> LaunchEnvironment | None:
    """torchrun, and all who set the same variables."""
    if variables.text("RANK") is None:
        return None  # WORLD_SIZE alone: an indexed Kubernetes job sets it
    variables.together("RANK", "WORLD_SIZE")
    source = "RANK and WORLD_SIZE"
    if variables.text("TORCHELASTIC_RUN_ID"):  # our launcher stands on torchrun's
        source = "shardwright run" if variables.text("SHARDWRIGHT_RUN_DIR") else "torchrun"
    return _by_names(variables, source=source)


def from_torchrun_defaults(variables: Variables) -> LaunchEnvironment | None:
    """``PET_*``: torchrun's options as a Kubeflow TrainJob sets them, for a script without torchrun."""
    if not variables.together("PET_NODE_RANK", "PET_NNODES"):
        return None
    per_node = variables.text("PET_NPROC_PER_NODE") or "1"
    if per_node not in ("1", "auto", "cpu", "gpu"):
        raise LaunchError(
            f"PET_NPROC_PER_NODE is {shown(per_node)}, but RANK is not set: this is one process. Start "
            "the script with torchrun or shardwright run."
        )
    return _one_process_per_node(
        variables,
        rank=variables.required_number("PET_NODE_RANK", because="PET_NNODES"),
        num_nodes=variables.count("PET_NNODES", because="PET_NODE_RANK"),
        prefix="PET_",
        source="PET_NODE_RANK",
    )


def from_slurm(variables: Variables) -> LaunchEnvironment | None:
    """A task that srun started."""
    rank = variables.number("SLURM_PROCID")
    if rank is None:
        return None
    world_size = variables.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    if world_size is None:
        raise LaunchError("SLURM_PROCID is set but SLURM_NTASKS is not. Start the script with srun.")
    if world_size > 1 and variables.text("SLURM_JOB_ID") and not variables.text("SLURM_STEP_ID"):
        # In the batch script itself SLURM_PROCID is 0: it would wait for ranks that nobody starts.
        raise LaunchError(
            f"SLURM_NTASKS is {world_size}, but SLURM_STEP_ID is not set: srun did not start this process. "
            "In the batch script write: srun python train.py"
        )
    num_nodes = variables.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or 1
    node_rank = variables.number("SLURM_NODEID") or 0
    return LaunchEnvironment(
        rank=rank,
        local_rank=_slurm_local_rank(variables, rank=rank, num_nodes=num_nodes),
        world_size=world_size,
        local_world_size=_slurm_tasks_on_node(
            variables, node_rank, world_size=world_size, num_nodes=num_nodes
        ),
        node_rank=node_rank,
        num_nodes=num_nodes,
        master_addr=variables.text("MASTER_ADDR") or _slurm_first_host(variables, world_size=world_size),
        master_port=variables.port("MASTER_PORT") or _slurm_port(variables),
        restart_count=variables.number("SLURM_RESTART_COUNT") or 0,
        source="Slurm",
    )


def _slurm_local_rank(variables: Variables, *, rank: int, num_nodes: int) -> int:
    local_rank = variables.number("SLURM_LOCALID")
    if local_rank is not None:
        return local_rank
    if num_nodes > 1:
        raise LaunchError("SLURM_PROCID is set but SLURM_LOCALID is not. Start the script with srun.")
    return rank


def _slurm_tasks_on_node(variables: Variables, node_rank: int, *, world_size: int, num_nodes: int) -> int:
    """``SLURM_TASKS_PER_NODE`` is a list such as ``4(x2),3``: twice four tasks, then three."""
    text = variables.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if text is None:
        return math.ceil(world_size / num_nodes)
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part)
        if match is None or len(counts) + int(match[2] or 1) > MOST_NODES:
            raise LaunchError(
                f"SLURM_TASKS_PER_NODE is {shown(text)}; it should look like 4(x2),3. Correct or unset it."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    if node_rank >= len(counts):
        raise LaunchError(
            f"SLURM_NODEID is {node_rank}, but SLURM_TASKS_PER_NODE {shown(text)} has {len(counts)} nodes."
        )
    return counts[node_rank]


def _slurm_first_host(variables: Variables, *, world_size: int) -> str:
    hosts = variables.text("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    if hosts is not None:
        return expand_hosts(hosts)[0]
    if world_size > 1:
        raise LaunchError(
            "SLURM_PROCID is set but SLURM_NODELIST is not. Set it, or MASTER_ADDR to the first host."
        )
    return "127.0.0.1"


def _slurm_port(variables: Variables) -> int:
    """Jobs that share a host should not share a port, so the job's number chooses it."""
    return 20_000 + (variables.number("SLURM_JOB_ID") or _DEFAULT_PORT) % 10_000


def from_open_mpi(variables: Variables) -> LaunchEnvironment | None:
    """A process that Open MPI's mpirun started."""
    if not variables.together("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        return None
    return _from_mpi(
        variables,
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        source="Open MPI",
    )


def from_pmi(variables: Variables) -> LaunchEnvironment | None:
    """A process that MPICH's or Intel MPI's mpirun started."""
    if not variables.together("PMI_RANK", "PMI_SIZE"):
        return None
    return _from_mpi(
        variables,
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_world_size="MPI_LOCALNRANKS",
        source="PMI",
    )


def _from_mpi(
    variables: Variables, *, rank: str, world_size: str, local_rank: str, local_world_size: str, source: str
) -> LaunchEnvironment:
    ranks = variables.count(world_size, because=rank)
    own_rank = variables.required_number(rank, because=world_size)
    on_this_host = variables.number(local_world_size) or ranks
    master_addr = variables.text("MASTER_ADDR")
    if on_this_host < ranks and master_addr is None and (hosts := variables.text("SM_HOSTS")):
        master_addr = _sagemaker_hosts(hosts)[0]  # on which SageMaker's launcher starts mpirun, and rank 0 is
    if on_this_host < ranks and master_addr is None:
        raise LaunchError(
            f"{world_size} is {ranks} and {local_world_size} is {on_this_host}: there are several hosts, but "
            "MASTER_ADDR does not say where they meet. Pass the first host: mpirun -x MASTER_ADDR=<host> ... "
            "(Open MPI), mpirun -genv MASTER_ADDR <host> ... (MPICH)."
        )
    own_local_rank = variables.number(local_rank)
    return LaunchEnvironment(
        rank=own_rank,
        local_rank=own_rank % on_this_host if own_local_rank is None else own_local_rank,
        world_size=ranks,
        local_world_size=on_this_host,
        node_rank=own_rank // on_this_host,
        num_nodes=math.ceil(ranks / on_this_host),
        master_addr=master_addr or "127.0.0.1",
        master_port=variables.port("MASTER_PORT")
        or (_mpi_port(variables) if on_this_host == ranks else _DEFAULT_PORT),
        source=source,
    )


def _mpi_port(variables: Variables) -> int:
    """Jobs that share a host should not share a port; Open MPI names each job."""
    job = variables.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    return _DEFAULT_PORT if job is None else 20_000 + zlib.crc32(job.encode()) % 10_000


def from_kubernetes(variables: Variables) -> LaunchEnvironment | None:
    """A pod of an indexed Kubernetes job, one process each."""
    rank = variables.number("JOB_COMPLETION_INDEX")
    if rank is None:
        return None
    num_nodes = variables.number("WORLD_SIZE", "NUM_NODES")
    if num_nodes is None:
        raise LaunchError(
            "JOB_COMPLETION_INDEX is set but WORLD_SIZE is not, and Kubernetes does not tell how many pods a "
            "job has. Set WORLD_SIZE in the pod template to the job's completions."
        )
    return _one_process_per_node(
        variables, rank=rank, num_nodes=num_nodes, prefix="", source="JOB_COMPLETION_INDEX"
    )


def from_sagemaker(variables: Variables) -> LaunchEnvironment | None:
    """A SageMaker training container, one process each."""
    if not variables.together("SM_HOSTS", "SM_CURRENT_HOST"):
        return None
    text, host = variables.text("SM_HOSTS") or "", variables.text("SM_CURRENT_HOST")
    hosts = _sagemaker_hosts(text)
    if host not in hosts:
        raise LaunchError(
            f"SM_CURRENT_HOST is {shown(host)}, which is not in SM_HOSTS {shown(text)}. Correct or "
            "unset them."
        )
    num_gpus = variables.number("SM_NUM_GPUS") or 0
    if num_gpus > 1:
        raise LaunchError(
            f"SM_NUM_GPUS says that this host has {num_gpus} GPUs, but one process uses one. Start more: "
            f"shardwright run -n {num_gpus} --nnodes {len(hosts)} --node-rank {hosts.index(host)} "
            f"--rdzv-endpoint {hosts[0]}:{_DEFAULT_PORT} --name NAME train.py"
        )
    return LaunchEnvironment(
        rank=hosts.index(host),
        local_rank=0,
        world_size=len(hosts),
        local_world_size=1,
        node_rank=hosts.index(host),
        num_nodes=len(hosts),
        master_addr=variables.text("MASTER_ADDR") or hosts[0],
        master_port=variables.port("MASTER_PORT") or _DEFAULT_PORT,
        source="SageMaker",
    )


def _sagemaker_hosts(text: str) -> list[str]:
    """The hosts of a training job; the first one is the master."""
    try:
        hosts = json.loads(text)
    except (ValueError, RecursionError):
        hosts = None
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) and host for host in hosts):
        raise LaunchError(
            f"SM_HOSTS is {shown(text)}, which is not a JSON list of names. Correct or unset it."
        )
    return sorted(hosts)


def from_single_process(variables: Variables) -> LaunchEnvironment:
    if (variables.number("WORLD_SIZE") or 1) > 1:
        variables.together("RANK", "WORLD_SIZE")
    return LaunchEnvironment(
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        node_rank=0,
        num_nodes=1,
        master_addr="127.0.0.1",
        master_port=_DEFAULT_PORT,
        source="a single process",
    )


def _one_process_per_node(
    variables: Variables, *, rank: int, num_nodes: int, prefix: str, source: str
) -> LaunchEnvironment:
    master_addr = variables.text(f"{prefix}MASTER_ADDR", "MASTER_ADDR")
    if master_addr is None:
        if num_nodes > 1:
            raise LaunchError(
                f"{source} is set, there are {num_nodes} nodes, but {prefix}MASTER_ADDR does not say where "
                "they meet. Set it to the host name of rank 0."
            )
        master_addr = "127.0.0.1"
    return LaunchEnvironment(
        rank=rank,
        local_rank=0,
        world_size=num_nodes,
        local_world_size=1,
        node_rank=rank,
        num_nodes=num_nodes,
        master_addr=master_addr,
        master_port=variables.port(f"{prefix}MASTER_PORT", "MASTER_PORT") or _DEFAULT_PORT,
        source=source,
    )


def _by_names(variables: Variables, *, source: str, prefix: str = "") -> LaunchEnvironment:
    """Reads ``RANK``, ``WORLD_SIZE`` and their companions, under a prefix."""

    def name(plain: str) -> str:
        return prefix + plain.upper()

    rank = variables.required_number(name("rank"), because=name("world_size"))
    world_size = variables.count(name("world_size"), because=name("rank"))
    alone = world_size == 1
    if not alone:
        variables.together(name("world_size"), name("master_addr"), name("master_port"))
    master_addr = variables.text(name("master_addr")) or "127.0.0.1"
    local_rank, local_world_size = _local(
        variables, name("local_rank"), name("local_world_size"), rank, world_size, master_addr
    )
    return LaunchEnvironment(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=rank // local_world_size
        if (node := variables.number(name("group_rank"))) is None
        else node,
        num_nodes=variables.number(name("group_world_size")) or math.ceil(world_size / local_world_size),
        master_addr=master_addr,
        master_port=variables.port(name("master_port")) or _DEFAULT_PORT,
        restart_count=variables.number("TORCHELASTIC_RESTART_COUNT") or 0,
        launcher_serves_store=variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True",
        source=source,
    )


def _local(
    variables: Variables, rank_name: str, size_name: str, rank: int, world_size: int, master_addr: str
) -> tuple[int, int]:
    on_one_host = world_size == 1 or master_addr in _LOOPBACK
    local_rank, local_world_size = variables.number(rank_name), variables.number(size_name, "LOCAL_SIZE")
    if local_rank is None and local_world_size is None:
        # As PyTorch's Kubernetes operator sets them: one process a host.
        return (rank, world_size) if on_one_host else (0, 1)
    if on_one_host:
        return (rank if local_rank is None else local_rank), (local_world_size or world_size)
    variables.together(rank_name, size_name)
    assert local_rank is not None
    assert local_world_size is not None
    return local_rank, local_world_size


_READERS = (
    from_own,
    from_torchrun,
    from_torchrun_defaults,
    from_slurm,
    from_open_mpi,
    from_pmi,
    from_kubernetes,
    from_sagemaker,
)


def detect(environ: Mapping[str, str]) -> LaunchEnvironment:
    """Reads where this process stands; see the top of this file for the order.

    >>> found = detect({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    >>> found.rank, found.local_rank, found.source
    (1, 1, 'RANK and WORLD_SIZE')
    >>> str(detect({}))
    'rank 0 of 1 (from a single process)'
    """
    variables = Variables(environ)
    found = next(filter(None, (reader(variables) for reader in _READERS)), None)
    return found or from_single_process(variables)
