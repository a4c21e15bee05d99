"""Which rank a process is, from the variables of each launcher, as literals."""

import pytest

from shardwright.comm.launch_environment import expand_hosts
from shardwright.comm.launchers import LaunchEnvironment, detect
from shardwright.errors import LaunchError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "42",
    "TORCHELASTIC_RESTART_COUNT": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}

SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "4,3",
    "SLURM_NODELIST": "gpu[07-08]",
}

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "first",
}

SAGEMAKER = {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "0"}


def without(variables, *names):
    return {name: value for name, value in variables.items() if name not in names}


def test_no_variables_are_a_single_process():
    assert detect({}) == LaunchEnvironment(
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        node_rank=0,
        num_nodes=1,
        master_addr="127.0.0.1",
        master_port=29500,
        source="a single process",
    )


def test_torchrun():
    assert detect(TORCHRUN) == LaunchEnvironment(
        rank=5,
        local_rank=1,
        world_size=8,
        local_world_size=4,
        node_rank=1,
        num_nodes=2,
        master_addr="node0",
        master_port=29400,
        restart_count=3,
        launcher_serves_store=True,
        source="torchrun",
    )


def test_rank_and_world_size_alone_on_one_host():
    found = detect({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1234"})
    assert (found.local_rank, found.local_world_size, found.num_nodes) == (1, 2, 1)
    assert found.source == "RANK and WORLD_SIZE"
    assert not found.launcher_serves_store


def test_kubeflow_without_torchrun():
    variables = {
        "PET_NODE_RANK": "1",
        "PET_NNODES": "3",
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "job-node-0-0.job",
        "PET_MASTER_PORT": "29500",
    }
    found = detect(variables)
    assert (found.rank, found.world_size, found.local_world_size) == (1, 3, 1)
    assert found.master_addr == "job-node-0-0.job"
    with pytest.raises(
        LaunchError, match=r"PET_NPROC_PER_NODE is '4', but RANK.*Start the script with torchrun"
    ):
        detect({**variables, "PET_NPROC_PER_NODE": "4"})


def test_slurm():
    assert detect(SLURM) == LaunchEnvironment(
        rank=6,
        local_rank=2,
        world_size=7,
        local_world_size=3,
        node_rank=1,
        num_nodes=2,
        master_addr="gpu07",
        master_port=20_000 + 4567,
        source="Slurm",
    )


def test_slurm_meets_where_the_user_says():
    found = detect({**SLURM, "MASTER_ADDR": "elsewhere", "MASTER_PORT": "1111"})
    assert (found.master_addr, found.master_port) == ("elsewhere", 1111)


def test_a_slurm_batch_script_without_srun_is_refused():
    batch = {
        **without(SLURM, "SLURM_STEP_ID"),
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
    }
    with pytest.raises(LaunchError, match=r"SLURM_NTASKS is 7, but SLURM_STEP_ID is not set.*srun python"):
        detect(batch)
    assert (
        detect({**batch, "SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_TASKS_PER_NODE": "1"}).world_size
        == 1
    )


def test_open_mpi():
    found = detect(OPEN_MPI)
    assert (found.rank, found.local_rank, found.world_size, found.local_world_size) == (3, 1, 4, 2)
    assert (found.node_rank, found.num_nodes, found.master_addr) == (1, 2, "first")
    assert found.source == "Open MPI"


def test_open_mpi_in_containers_of_sagemaker_meets_at_their_first_host():
    found = detect({**without(OPEN_MPI, "MASTER_ADDR"), "SM_HOSTS": '["algo-2", "algo-1"]'})
    assert (found.rank, found.num_nodes, found.master_addr) == (3, 2, "algo-1")


@pytest.mark.parametrize("hosts", ["[]", '"abc"', '{"algo-1": 1}', "[1, 2]", '[""]', '["algo-1", null]', "7"])
@pytest.mark.parametrize("launcher", [without(OPEN_MPI, "MASTER_ADDR"), {"SM_CURRENT_HOST": "a"}])
def test_hosts_of_sagemaker_that_are_no_names_are_refused(launcher, hosts):
    """An empty list was an IndexError, and a single text was taken for hosts of one letter each."""
    with pytest.raises(LaunchError, match=r"which is not a JSON list of names\. Correct or unset it"):
        detect({**launcher, "SM_HOSTS": hosts})


def test_mpich_on_one_host():
    found = detect({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
    assert (found.rank, found.local_rank, found.world_size, found.master_addr) == (1, 1, 2, "127.0.0.1")
    assert found.source == "PMI"


def test_an_indexed_kubernetes_job():
    found = detect({"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "train-0.train"})
    assert (found.rank, found.world_size, found.local_world_size, found.num_nodes) == (2, 4, 1, 4)
    assert found.source == "JOB_COMPLETION_INDEX"


def test_sagemaker():
    found = detect(SAGEMAKER)
    assert (found.rank, found.world_size, found.local_rank) == (1, 2, 0)
    assert (found.master_addr, found.source) == ("algo-1", "SageMaker")


ALL = [
    ("SHARDWRIGHT_RANK", {"SHARDWRIGHT_RANK": "0", "SHARDWRIGHT_WORLD_SIZE": "1"}),
    ("torchrun", TORCHRUN),
    ("PET_NODE_RANK", {"PET_NODE_RANK": "0", "PET_NNODES": "1"}),
    ("Slurm", SLURM),
    ("Open MPI", OPEN_MPI),
    ("PMI", {"PMI_RANK": "0", "PMI_SIZE": "1"}),
    ("JOB_COMPLETION_INDEX", {"JOB_COMPLETION_INDEX": "0", "NUM_NODES": "1"}),
    ("SageMaker", SAGEMAKER),
]


@pytest.mark.parametrize("first", range(len(ALL)))
def test_the_order_in_which_launchers_are_asked(first):
    present = {}
    for _, variables in reversed(ALL[first:]):
        present |= variables
    assert detect(present).source == ALL[first][0]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (without(TORCHRUN, "WORLD_SIZE"), "RANK is set but WORLD_SIZE is not"),
        (without(TORCHRUN, "MASTER_ADDR"), "WORLD_SIZE and MASTER_PORT are set but MASTER_ADDR is not"),
        (without(TORCHRUN, "LOCAL_WORLD_SIZE"), "LOCAL_RANK is set but LOCAL_WORLD_SIZE is not"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE is set but RANK is not"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "0"}, "PET_MASTER_ADDR does not say where they meet"),
        ({"SLURM_PROCID": "0"}, "SLURM_PROCID is set but SLURM_NTASKS is not"),
        (without(SLURM, "SLURM_NODELIST"), "SLURM_NODELIST is not"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "4(x"}, r"SLURM_TASKS_PER_NODE is '4\(x'"),
        ({**SLURM, "SLURM_NODEID": "2"}, "SLURM_NODEID is 2, but SLURM_TASKS_PER_NODE '4,3' has 2 nodes"),
        ({**SLURM, "SLURM_NODELIST": "gpu[1-"}, r"'gpu\[1-' is not a list of hosts"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not"),
        ({"JOB_COMPLETION_INDEX": "0"}, "JOB_COMPLETION_INDEX is set but WORLD_SIZE is not"),
        ({"JOB_COMPLETION_INDEX": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR does not say where they meet"),
        (
            {"SM_HOSTS": "algo-1", "SM_CURRENT_HOST": "algo-1"},
            "SM_HOSTS is 'algo-1', which is not a JSON list",
        ),
        ({**SAGEMAKER, "SM_CURRENT_HOST": "algo-9"}, "SM_CURRENT_HOST is 'algo-9', which is not in SM_HOSTS"),
        ({**TORCHRUN, "RANK": "8"}, "torchrun: rank 8 is not in 0 to 7, although the world size is 8"),
        ({**TORCHRUN, "RANK": "two"}, "RANK is 'two', which is not a whole number"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "local rank 4 is not in 0 to 3"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "local world size 9 exceeds world size 8"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT is 70000, but a port is from 1 to 65535"),
    ],
)
def test_half_set_and_contradictory_variables_are_named(variables, message):
    with pytest.raises(LaunchError, match=message):
        detect(variables)


def test_an_empty_variable_counts_as_unset():
    assert detect({"RANK": "", "WORLD_SIZE": ""}).source == "a single process"


@pytest.mark.parametrize("text", ["", "a,,b", "a[1", "a[x]", "a]1"])
def test_a_wrong_list_of_hosts_is_refused(text):
    with pytest.raises(LaunchError):
        expand_hosts(text)
