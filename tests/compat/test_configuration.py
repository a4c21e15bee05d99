"""Settings of smp: where they come from, what each key of the library's table does, what others do.

Errors name what scripts for smp know.

What launchers say: ``--mp_parameters`` on the command line, ``SM_FRAMEWORK_PARAMS``, and who wins.
"""

import json

import pytest
import torch

import smdistributed.modelparallel.torch as smp
from shardwright.config import Config
from shardwright.errors import ConfigError, ShardwrightError, UsageError, library_named
from shardwright.exit_codes import exit_code_of
from shardwright.launch.processes import WorkerExit
from shardwright.launch.ranks.verdict import exit_code
from shardwright.testing import run_ranks
from smdistributed.modelparallel.configuration import PARAMETERS_VARIABLE, read_configuration
from smdistributed.modelparallel.launcher_parameters import contradictions, parameters_among
from smdistributed.modelparallel.torch import exceptions

# Key -> (its default, another value that is accepted).
KEYS = {
    "partitions": (1, 2),
    "pipeline_parallel_degree": (1, 2),
    "microbatches": (1, 4),
    "pipeline": ("interleaved", "simple"),
    "optimize": ("memory", "speed"),
    "auto_partition": (True, False),
    "default_partition": (0, 0),
    "placement_strategy": ("cluster", "spread"),
    "contiguous": (True, False),
    "horovod": (False, False),
    "xla": (False, True),
    "fork": (False, True),
    "load_partition": (False, False),
    "memory_weight": (0.8, 0.3),
    "ddp": (False, True),
    "ddp_port": (None, 12345),
    "ddp_dist_backend": ("auto", "nccl"),
    "active_microbatches": (3, 2),
    "deterministic_server": (False, True),
    "offload_activations": (False, True),
    "activation_loading_horizon": (4, 2),
    "tensor_parallel_degree": (1, 1),
    "fp16_params": (False, True),
    "fp16": (False, True),
    "bf16": (False, True),
    "shard_optimizer_state": (False, True),
    "prescaled_batch": (False, True),
    "skip_tracing": (False, True),
    "sharded_data_parallel_degree": (1, 2),
    "sdp_reduce_bucket_size": (500_000_000, 5e8),
    "sdp_param_persistence_threshold": (1_000_000, 1e5),
    "sdp_max_live_parameters": (1_000_000_000, 1e9),
    "sdp_hierarchical_allgather": (True, False),
    "sdp_gradient_clipping": (1.0, 0.5),
    "delayed_parameter_initialization": (False, True),
    "static_mode": (False, True),
    "fast_mode": (False, True),
    "checkpoint_attentions": (False, True),
    "_match_weights": (False, True),
    "_fp32_grad_accumulation": (False, True),
    "overlapping_allreduce": (True, False),
}


def read(config=None, **environ):
    return read_configuration(config, environ)


@pytest.mark.parametrize("key", KEYS)
def test_every_key_has_its_default_and_takes_another_value(key):
    default, other = KEYS[key]
    assert read().values[key] == default

    given = {"default_partition": 0, "ddp": True, key: other}
    found = read(given)

    assert found.values[key] == other
    Config.parse(found.settings)


def test_offload_has_the_horizon_of_the_library():
    """4, where our own default is smaller; nothing is said of it where nothing is offloaded."""
    assert "activation_loading_horizon" not in read().settings
    found = Config.parse(read({"offload_activations": True}).settings)
    assert (found.offload_activations, found.activation_loading_horizon) == (True, 4)
    given = read({"offload_activations": True, "activation_loading_horizon": 7})
    assert given.remarks == ()
    assert Config.parse(given.settings).activation_loading_horizon == 7


def test_the_launcher_wins_over_the_script():
    environ = {PARAMETERS_VARIABLE: json.dumps({"partitions": 2, "microbatches": 8})}
    found = read({"pipeline_parallel_degree": 4, "pipeline": "simple"}, **environ)
    assert (found.values["partitions"], found.values["microbatches"]) == (2, 8)
    assert found.settings["pipeline"] == "simple"


@pytest.mark.parametrize("text", ["[1, 2]", "nonsense", '{"partitions": 2', "{2: 3}"])
def test_other_text_from_the_launcher_is_refused(text):
    with pytest.raises(ConfigError, match=f"{PARAMETERS_VARIABLE} cannot be used"):
        read(**{PARAMETERS_VARIABLE: text})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"pipeline": "fast"}, "pipeline is 'fast', but it must be simple"),
        ({"partitions": 0}, "^partitions is 0, but it must be at least 1"),
        ({"ddp": "yes"}, "ddp is 'yes', but it must be true or false"),
        ({"partition_file": 3}, "partition_file is 3, but it must be text"),
        ({"auto_partition": False}, "auto_partition is False, but default_partition"),
        ({"partitions": 2, "default_partition": 2}, "it must be from 0 to 1"),
        ({"memory_weight": 1.5}, "memory_weight is 1.5"),
        ({"ddp_port": 1234}, "ddp_port is 1234, but it has a meaning only with ddp"),
        ({"ddp": True, "horovod": True}, "ddp and horovod are both True"),
    ],
)
def test_settings_are_checked_as_an_estimator_checks_them(given, told):
    with pytest.raises(ConfigError, match=told):
        read(given)


def test_an_unknown_key_is_passed_over_and_told_with_the_nearest_one():
    found = read({"microbatchs": 4, "something_of_another_year": 1})
    assert found.values["microbatches"] == 1
    assert "Did you mean microbatches?" in found.remarks[0]
    assert "something_of_another_year is not a setting" in found.remarks[1]
    assert "something_of_another_year" not in found.settings


def test_degrees_and_horovod_are_taken():
    assert read({"tensor_parallel_degree": 2, "ddp": True}).settings["tensor_parallel_degree"] == 2
    found = read({"horovod": True})
    assert found.values["horovod"] is True
    assert "horovod" not in found.settings


def test_defaults_of_the_library_are_stated_where_ours_are_others():
    settings = Config.parse(read().settings)
    assert (settings.pipeline_parallel_degree, settings.microbatches, settings.pipeline) == (1, 1, "1f1b")
    assert settings.balance_weight == 0.8
    assert Config.parse(read({"optimize": "speed"}).settings).balance_weight == 0.2
    sharded = Config.parse(read({"sharded_data_parallel_degree": 2, "ddp": True}).settings)
    assert sharded.sdp_gradient_clipping == 1.0
    assert sharded.sdp_param_persistence_threshold == 1_000_000


def test_the_library_has_the_name_that_the_script_gives_it() -> None:
    error = UsageError("decorate it with @sw.step, not under `if sw.rank() == 0:`; sw.Checkpoints saves")
    with library_named("smp"):
        assert str(error) == (
            "decorate it with @smp.step, not under `if smp.rank() == 0:`; sw.Checkpoints saves"
        )
    assert str(error).startswith("decorate it with @sw.step")


def test_errors_of_a_run_name_smp() -> None:
    def run() -> None:
        smp.init({"partitions": 1, "run_dir": "off"})
        step = smp.step(lambda model, x: model(x))
        with pytest.raises(UsageError, match=r"Call smp\.DistributedModel\(model\) before the first step"):
            step(None, torch.ones(2))
        smp.shutdown()
        assert str(UsageError("sw.step")) == "sw.step"

    run_ranks(run, 1)


def test_a_backward_of_what_a_step_has_returned_says_where_it_belongs() -> None:
    """It was PyTorch's "element 0 of tensors does not require grad"."""

    def run() -> None:
        original = torch.autograd.backward
        smp.init({"partitions": 1, "run_dir": "off"})
        model = smp.DistributedModel(torch.nn.Linear(2, 1)).eval()
        loss = smp.step(lambda model, x: model(x).mean())(model, torch.ones(2, 2)).reduce_mean()
        with pytest.raises(UsageError, match=r"for reading, reduce_mean\(\) too.*decorated with @smp\.step"):
            (loss / 2).backward()
        weight = torch.ones((), requires_grad=True)
        (2 * weight).backward()  # of another model
        assert weight.grad == 2
        smp.shutdown()
        assert torch.autograd.backward is original

    run_ranks(run, 1)


@pytest.mark.parametrize("name", exceptions.__all__)
def test_a_run_ends_with_the_code_of_an_error_wherever_it_is_defined(name: str) -> None:
    """`NotInitializedError`, which is no error of `shardwright.errors` itself, ended runs with 5."""
    kind = getattr(exceptions, name)
    text = f"Traceback (most recent call last):\n  File 'train.py', line 3\n{kind.__module__}.{name}: text"
    ended = WorkerExit(rank=0, local_rank=0, life=0, exit_code=1, at_s=9.0, seconds=4.0, error=text, log="")
    expected = 5 if kind is ShardwrightError else exit_code_of(kind)
    assert exit_code([ended]) == expected


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--mp_parameters", "partitions=2,ddp=True,pipeline=simple"],
         {"partitions": 2, "ddp": True, "pipeline": "simple"}),
        (["--lr", "1", "--mp_parameters=partitions=2,microbatches=4", "--epochs", "2"],
         {"partitions": 2, "microbatches": 4}),
        (["--mp-parameters", '{"partitions": 2, "ddp": true}'], {"partitions": 2, "ddp": True}),
        (["--mp_parameters", "partitions=2", "--mp_parameters", "partitions=3"], {"partitions": 3}),
        (["--mp_parameters", ""], {}),
        (["--mp_parameters", "--epochs", "2"], {}),
        (["--mp_parameters"], {}),
        (["--epochs", "2"], {}),
        ([], {}),
    ],
)  # fmt: skip
def test_parameters_on_the_command_line(words, found):
    assert parameters_among(words) == found


def test_parameters_that_cannot_be_read_are_named():
    with pytest.raises(ConfigError, match=r"^--mp_parameters of the script cannot be used: .*"):
        parameters_among(["--mp_parameters", "partitions"])


def test_the_environment_wins_over_the_command_line_and_that_over_the_script():
    environ = {"SM_HP_MP_PARAMETERS": json.dumps({"partitions": 2})}
    words = ["--mp_parameters", "partitions=3,microbatches=4"]
    in_script = {"partitions": 5, "microbatches": 5, "optimize": "speed"}
    values = read_configuration(in_script, environ, words).values
    assert (values["partitions"], values["microbatches"], values["optimize"]) == (2, 4, "speed")


@pytest.mark.parametrize(
    ("said", "part"),
    [
        ({"sagemaker_mpi_enabled": True, "sagemaker_mpi_num_of_processes_per_host": 8},
         "8 processes on each host"),
        ({"sagemaker_distributed_dataparallel_enabled": True}, "one of the two libraries trains a model"),
        ({"sagemaker_mpi_enabled": True, "sagemaker_mpi_num_of_processes_per_host": 2}, None),
        ({"sagemaker_mpi_enabled": False, "sagemaker_mpi_num_of_processes_per_host": 8}, None),
        ({"sagemaker_instance_type": "ml.p4d.24xlarge"}, None),
    ],
)  # fmt: skip
def test_what_the_framework_parameters_say_otherwise_is_told(said, part):
    found = contradictions({"SM_FRAMEWORK_PARAMS": json.dumps(said)}, local_size=2)
    assert len(found) == (part is not None)
    assert part is None or part in found[0]


@pytest.mark.parametrize("text", ["{", "[1]", "yes"])
def test_framework_parameters_that_cannot_be_read_are_an_error(text):
    with pytest.raises(ConfigError, match=r"SM_FRAMEWORK_PARAMS is .* not a JSON object"):
        contradictions({"SM_FRAMEWORK_PARAMS": text}, local_size=1)
