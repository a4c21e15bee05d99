"""Dictionaries, environment variables and an estimator's arguments that ask for what cannot be."""

import math
import os

import pytest

from shardwright.comm.launchers import detect
from shardwright.config import Config
from shardwright.errors import ConfigError, LaunchError, ShardwrightError
from shardwright.launch import Estimator
from shardwright.run.launch_settings import settings_from

BIG, DEEP = 10**5000, "[" * 100_000
ENDLESS: list[object] = []
ENDLESS.append(ENDLESS)


def nested(depth: int) -> dict[str, object]:
    whole = inner = {}
    for _ in range(depth):
        inner["a"] = {}
        inner = inner["a"]
    return whole


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"microbatches": BIG}, "microbatches is a whole number of more than 4300 digits"),
        ({"microbatches": ENDLESS}, "microbatches is [[[[[[[...]]]]]]]"),
        ({"microbatches": nested(5000)}, "microbatches is {'a': "),
        ({"data_parallel_degree": 10**18}, "data_parallel_degree is 1000000000000000000"),
        ({"pipeline_parallel_degree": True}, "pipeline_parallel_degree is True, but it must be a number"),
        ({"partitions": BIG, "pipeline_parallel_degree": 3}, "they are two names of one setting"),
        ({"timeout_s": math.nan}, "timeout_s is nan"),
        ({"timeout_s": BIG}, "timeout_s is a whole number of more than"),
        ({"timeout_s": 1e-300}, "timeout_s is 1e-300, but it must be at least 0.001"),
        ({"memory_weight": math.nan}, "memory_weight is nan"),
        ({"sdp_gradient_clipping": math.inf}, "sdp_gradient_clipping is inf"),
        ({"memory_limit": BIG}, "memory_limit is a whole number of more than"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"run_name": "a\x1b[2J"}, "run_name is 'a\\x1b[2J'"),
        ({"run_dir": "a\u202eb"}, "run_dir is 'a\\u202eb'"),
        ({"plan": "a\nb"}, "plan is 'a\\nb'"),
        ({"micro\x1bbatches": 4}, "micro\\u001bbatches is not a setting. Did you mean microbatches?"),
        ({1: 2}, "1 is not a setting"),
        ({"ignored": 5}, "ignored is 5, but it must be a list"),
        (["microbatches"], "the settings are ['microbatches'], but they must be a dictionary"),
    ],
)
def test_dictionaries(settings, message):
    with pytest.raises(ConfigError) as refused:
        Config.parse(settings)
    assert message in str(refused.value)
    assert "\x1b" not in str(refused.value)


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_ID": "1",
    "SLURM_JOB_ID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "a",
    "SLURM_NNODES": "1",
}
KUBEFLOW = {"PET_NODE_RANK": "0", "PET_NNODES": "1"}
SAGEMAKER = {"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "a"}


@pytest.mark.parametrize(
    ("launcher", "changed", "message"),
    [
        (TORCHRUN, {"WORLD_SIZE": "0"}, "WORLD_SIZE is 0, but it must be from 1"),
        (TORCHRUN, {"WORLD_SIZE": "-1"}, "WORLD_SIZE is -1"),
        (TORCHRUN, {"WORLD_SIZE": "1_0"}, "WORLD_SIZE is '1_0'"),
        (TORCHRUN, {"WORLD_SIZE": "99999999999"}, "WORLD_SIZE is 99999999999"),
        (TORCHRUN, {"WORLD_SIZE": "9" * 5000}, "which is not a whole number"),
        (TORCHRUN, {"RANK": "\x1b"}, "RANK is '\\x1b'"),
        (TORCHRUN, {"MASTER_PORT": "99999999"}, "MASTER_PORT is 99999999, but a port is from 1 to 65535"),
        (TORCHRUN, {"MASTER_ADDR": "a\x1b"}, "the address of the master is 'a\\x1b'"),
        (TORCHRUN, {"GROUP_WORLD_SIZE": "99999999999"}, "the number of nodes 99999999999"),
        (SLURM, {"SLURM_NODELIST": "gpu[0-99999999999]"}, "has more than 100000 hosts"),
        (SLURM, {"SLURM_NODELIST": "a[0-9]" * 12}, "has more than 100000 hosts"),
        (SLURM, {"SLURM_NODELIST": ",".join(["a[0-60000]"] * 9)}, "has more than 100000 hosts"),
        (SLURM, {"SLURM_TASKS_PER_NODE": "1(x99999999999)"}, "SLURM_TASKS_PER_NODE is '1(x99999999999)'"),
        (SLURM, {"SLURM_NTASKS": "99999999999"}, "the world size is 99999999999"),
        (TORCHRUN, {"TORCHELASTIC_RESTART_COUNT": "-1"}, "the number of restarts is -1"),
        (KUBEFLOW, {"PET_NPROC_PER_NODE": "4\n\x1b[2J"}, "PET_NPROC_PER_NODE is '4\\n\\x1b[2J'"),
        (KUBEFLOW, {"PET_NPROC_PER_NODE": "9" * 5000}, "PET_NPROC_PER_NODE is '9999"),
        (SAGEMAKER, {"SM_CURRENT_HOST": "b" * 5000}, "SM_CURRENT_HOST is 'bbb"),
        (SAGEMAKER, {"SM_HOSTS": DEEP}, "which is not a JSON list of names"),
    ],
)
def test_variables_of_launchers(launcher, changed, message):
    with pytest.raises(LaunchError) as refused:
        detect({**launcher, **changed})
    assert message in str(refused.value)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("SHARDWRIGHT_DEVICE", "tpu", "SHARDWRIGHT_DEVICE is 'tpu', but it must be auto or cpu"),
        ("SHARDWRIGHT_DEVICE", "\x1b", "SHARDWRIGHT_DEVICE is '\\x1b'"),
        ("SHARDWRIGHT_SET", DEEP, "it is nested more than 64 deep"),
        ("SHARDWRIGHT_SET", "[]", "the settings of SHARDWRIGHT_SET are []"),
        ("SHARDWRIGHT_SET", '{"seed": 1, "seed": 2}', "'seed' is there twice"),
        ("SHARDWRIGHT_SET", '{"timeout_s": NaN}', "timeout_s is nan"),
        ("SHARDWRIGHT_CONFIG", "fifo", "SHARDWRIGHT_CONFIG fifo cannot be read: it is a pipe"),
        ("SHARDWRIGHT_CONFIG", "/dev/zero", "SHARDWRIGHT_CONFIG /dev/zero cannot be read: it is a device"),
        ("SHARDWRIGHT_CONFIG", ".", "SHARDWRIGHT_CONFIG . cannot be read: Is a directory"),
        ("SHARDWRIGHT_CONFIG", "bad.yaml", "SHARDWRIGHT_CONFIG bad.yaml: microbatches is 0"),
        ("SHARDWRIGHT_CONFIG", "list.yaml", "the settings of SHARDWRIGHT_CONFIG are []"),
    ],
)
def test_settings_of_the_launcher(variable, text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    (tmp_path / "bad.yaml").write_text("microbatches: 0\n")
    (tmp_path / "list.yaml").write_text("[]\n")
    with pytest.raises(ConfigError) as refused:
        settings_from({variable: text})
    assert message in str(refused.value)


def smp(**parameters):
    return {"smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"instance_count": 10**12}, "instance_count is 1000000000000"),
        ({"instance_count": BIG}, "instance_count is a whole number of more than"),
        ({"processes_per_host": 10**12}, "processes_per_host is 1000000000000"),
        ({"processes_per_host": math.nan}, "processes_per_host is nan"),
        ({"max_run": math.nan}, "max_run is nan"),
        ({"max_restarts": 10**12}, "max_restarts is 1000000000000"),
        ({"hyperparameters": 5}, "hyperparameters is 5, but it must be a dictionary"),
        ({"hyperparameters": {"a": ENDLESS}}, "hyperparameter a is [[[[[[[...]]]]]]]"),
        ({"hyperparameters": {"a": nested(100_000)}}, "hyperparameter a is {'a': "),
        ({"hyperparameters": {"a": BIG}}, "hyperparameter a is a whole number of more than"),
        ({"hyperparameters": {"a\x1b": 1}}, "a hyperparameter is called 'a\\x1b'"),
        ({"environment": 5}, "environment is 5, but it must be a dictionary"),
        ({"environment": {"A\x1b": "x"}}, "environment has a variable 'A\\x1b'"),
        ({"instance_type": "\x1b"}, "instance_type is '\\x1b'"),
        ({"output_path": "a\nb"}, "output_path is "),
        ({"distribution": {"processes_per_host": 10**18}}, "processes_per_host is 1000000000000000000"),
        ({"distribution": {"shardwright": {"parameters": "fifo"}}}, "fifo cannot be read: it is a pipe"),
        ({"distribution": smp(partitions=BIG)}, "partitions is a whole number of more than"),
        (
            {"distribution": {"smdistributed": {"modelparallel": {"enabled": True, "parameters": "fifo"}}}},
            "fifo cannot be read: it is a pipe",
        ),
    ],
)
def test_arguments_of_an_estimator(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    (tmp_path / "train.py").touch()
    (tmp_path / "bad.yaml").write_text("microbatches: 0\n")
    with pytest.raises(ShardwrightError) as refused:
        Estimator("train.py", **arguments)
    assert message in str(refused.value)
    assert "\x1b" not in str(refused.value)
