"""What launchers say: ``--mp_parameters`` on the command line, ``SM_FRAMEWORK_PARAMS``, and who wins."""

import json

import pytest

from shardwright.errors import ConfigError
from smdistributed.modelparallel.configuration import read_configuration
from smdistributed.modelparallel.launcher_parameters import contradictions, parameters_among


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
