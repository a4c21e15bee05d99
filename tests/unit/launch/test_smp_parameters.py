"""Parameters of SageMaker's model parallel library: one test for each rule, one message each.

The variables that scripts written for SageMaker read: what they hold, and that nothing set is changed.
"""

import json
from dataclasses import replace

import pytest

from shardwright.comm.launchers import detect
from shardwright.errors import ConfigError
from shardwright.launch.ranks.rank_environment import (
    from_words,
    hyperparameter_variables,
    rank_variables,
    to_words,
    with_plain_values,
)
from shardwright.launch.ranks.request import LaunchRequest, job_variables
from shardwright.launch.ranks.smp_parameters import (
    check_smp_parameters,
    check_world,
    read_smp_parameters,
)

GOOD = {"partitions": 2, "microbatches": 4}


def problem(**parameters):
    with pytest.raises(ConfigError) as caught:
        check_smp_parameters({**GOOD, **parameters})
    return str(caught.value)


def accepts(**parameters):
    assert check_smp_parameters({**GOOD, **parameters}) == ()


def test_a_published_dictionary_is_accepted():
    published = {"placement_strategy": "spread", "pipeline": "interleaved", "optimize": "speed", "ddp": True}
    published |= {"contiguous": True, "auto_partition": True, "default_partition": 0, "memory_weight": 0.5}
    published |= {"active_microbatches": 3, "deterministic_server": True, "horovod": False, "ddp_port": 8888}
    published |= {"ddp_dist_backend": "nccl", "load_partition": False, "partition_file": "partition.json"}
    published |= {"static_mode": 1, "_match_weights": True, "xla": False, "sdp_gradient_clipping": 1.0}
    accepts(**published)


@pytest.mark.parametrize("key", ["microbatches", "partitions", "active_microbatches"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True])
def test_counts_are_whole_numbers_of_at_least_1(key, value):
    rule = "at least 1" if type(value) is int else "a whole number"
    assert f"{key} is {value!r}, but it must be {rule}" in problem(**{key: value})


@pytest.mark.parametrize(
    "key", ["auto_partition", "contiguous", "load_partition", "horovod", "ddp", "deterministic_server"]
)
@pytest.mark.parametrize("value", [1, "true"])
def test_flags_are_bools(key, value):
    assert f"{key} is {value!r}, but it must be true or false" in problem(**{key: value})


def test_errors_say_what_a_parameter_means():
    assert "ddp_port is 65536, but it must be a TCP port, from 1 to 65535." in problem(ddp_port=65536)


@pytest.mark.parametrize(("key", "value"), [("ddp_port", 8888), ("ddp_dist_backend", "nccl")])
def test_settings_of_ddp_need_ddp(key, value):
    assert f"{key} is {value!r}, but it has a meaning only with ddp" in problem(**{key: value})
    assert "only with ddp" in problem(**{key: value, "ddp": False})
    accepts(**{key: value, "ddp": True})


def test_an_estimator_needs_the_number_of_partitions_under_either_name():
    with pytest.raises(ConfigError, match=r'partitions is missing.*Add "partitions": 2'):
        check_smp_parameters({"microbatches": 4}, needs_degree=True)
    check_smp_parameters({"microbatches": 4})
    check_smp_parameters({"pipeline_parallel_degree": 2}, needs_degree=True)
    check_smp_parameters({"sharded_data_parallel_degree": 2, "ddp": True}, needs_degree=True)


def test_the_two_names_of_the_number_of_partitions_agree():
    accepts(pipeline_parallel_degree=2)
    assert "partitions is 2 and pipeline_parallel_degree is 4" in problem(pipeline_parallel_degree=4)


def test_an_unknown_key_is_noted_with_the_nearest():
    (remark,) = check_smp_parameters({**GOOD, "microbatch_of_a_later_version": 4})
    assert remark.endswith("is passed over.")
    assert "micro_batches is not a parameter. Did you mean microbatches?" in problem(micro_batches=4)
    assert check_smp_parameters({**GOOD, "timeout_s": 60, "memory-weight": 0.1}) == ()


def test_parameters_in_a_file(tmp_path):
    path = tmp_path / "smp.json"
    path.write_text(json.dumps(GOOD))
    assert read_smp_parameters(path) == read_smp_parameters(str(path)) == GOOD
    path.write_text("[1]")
    with pytest.raises(ConfigError, match=r"smp\.json has a list where parameters"):
        read_smp_parameters(path)
    path.write_text("{'a': 1}")
    with pytest.raises(ConfigError, match=r"smp\.json is no JSON: line 1"):
        read_smp_parameters(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"smp\.json is no UTF-8 text"):
        read_smp_parameters(path)
    with pytest.raises(ConfigError, match=r"missing\.json cannot be read: No such file"):
        read_smp_parameters("missing.json")


def test_parameters_as_text():
    assert read_smp_parameters('{"partitions": 2, "microbatches": 4}') == GOOD
    assert read_smp_parameters("partitions=2, microbatches=4") == GOOD
    found = read_smp_parameters("pipeline=simple,ddp=True,optimize=None,memory-weight=0.5")
    assert found == {"pipeline": "simple", "ddp": True, "optimize": None, "memory_weight": 0.5}
    with pytest.raises(ConfigError, match=r"'microbatches' in .* is no parameter.*Write key=value pairs"):
        read_smp_parameters("partitions=2,microbatches")
    with pytest.raises(ConfigError, match="are a int, but they must be a dictionary"):
        read_smp_parameters(3)


def test_ranks_that_cannot_be_divided():
    check_world({"partitions": 2}, num_hosts=1, processes_per_host=4)
    check_world({}, num_hosts=1, processes_per_host=1)
    with pytest.raises(
        ConfigError, match=r"partitions is 4, but instance_count\(2\) \* processes_per_host\(3\) = 6 ranks"
    ):
        check_world({"pipeline_parallel_degree": 4}, num_hosts=2, processes_per_host=3)
    three = {"partitions": 2, "tensor_parallel_degree": 2}
    check_world(three, num_hosts=1, processes_per_host=8)
    with pytest.raises(ConfigError, match="tensor_parallel_degree is 2, together 4, but"):
        check_world(three, num_hosts=1, processes_per_host=2)


RANK = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "first",
    "MASTER_PORT": "1234",
}

CONTRACT = (
    "SM_NUM_GPUS SM_HOSTS SM_CURRENT_HOST SM_MODEL_DIR SM_OUTPUT_DATA_DIR SM_CHANNELS SM_MODULE_DIR SM_HPS "
    "SM_USER_ARGS SM_FRAMEWORK_PARAMS SM_TRAINING_ENV OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE "
    "OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE MASTER_ADDR MASTER_PORT"
).split()


@pytest.fixture
def variables(tmp_path):
    (tmp_path / "train.py").touch()

    def found(*arguments, num_gpus=0, environ=None, **changes):
        request = LaunchRequest(
            target=str(tmp_path / "train.py"),
            arguments=arguments,
            run_folder=tmp_path / "runs/one",
            num_ranks=2,
            **changes,
        )
        whole = {**RANK, **(environ or {})}
        whole |= request.worker_environ(whole)
        whole |= job_variables(request, whole, num_gpus=num_gpus)
        return whole | rank_variables(whole)

    return found


def test_every_variable_of_the_contract_is_there(variables, tmp_path):
    found = variables("--epochs", "3", "--learning-rate", "0.1", num_gpus=2)
    assert [name for name in CONTRACT if not found.get(name)] == []
    assert found["SM_MODEL_DIR"] == str(tmp_path / "runs/one/model")
    assert found["SM_OUTPUT_DATA_DIR"] == str(tmp_path / "runs/one/output/data")
    assert found["SM_MODULE_DIR"] == str(tmp_path)
    assert (found["SM_NUM_GPUS"], found["SM_CHANNELS"]) == ("2", "[]")
    assert json.loads(found["SM_HPS"]) == {"epochs": 3, "learning-rate": 0.1}
    assert json.loads(found["SM_USER_ARGS"]) == ["--epochs", "3", "--learning-rate", "0.1"]
    assert found["SM_HP_EPOCHS"] == "3"
    assert found["SM_HP_LEARNING-RATE"] == found["SM_HP_LEARNING_RATE"] == "0.1"
    assert (found["SM_USER_ENTRY_POINT"], found["SM_MODULE_NAME"]) == ("train.py", "train")
    assert found["TRAINING_JOB_NAME"] == "one"


def test_ranks_and_hosts(variables):
    found = variables()
    assert json.loads(found["SM_HOSTS"]) == ["algo-1", "algo-2"]
    assert found["SM_CURRENT_HOST"] == "algo-2"
    world = [found[f"OMPI_COMM_WORLD_{name}"] for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    assert world == ["3", "4", "1", "2"]
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("first", "1234")


def test_the_launcher_is_still_found_as_before(variables):
    environ = {"TORCHELASTIC_RUN_ID": "1"}
    found = detect(variables(environ=environ, num_gpus=8))
    assert found == replace(detect({**RANK, **environ}), source="shardwright run")
    assert detect(variables()).source == "RANK and WORLD_SIZE"


def test_what_a_user_has_set_stays(variables):
    environ = {
        "SM_HOSTS": '["one", "two"]',
        "SM_MODEL_DIR": "/models",
        "SM_NUM_GPUS": "4",
        "SM_CHANNEL_TRAIN": "/data/train",
        "SM_HP_EPOCHS": "7",
        "SM_FRAMEWORK_PARAMS": '{"sagemaker_instance_type": "ml.p4d.24xlarge"}',
    }
    found = variables("--epochs", "3", environ=environ)
    assert {name: found[name] for name in environ} == environ
    assert found["SM_CURRENT_HOST"] == "two"
    assert found["SM_CHANNELS"] == '["train"]'
    assert found["SM_CURRENT_INSTANCE_TYPE"] == "ml.p4d.24xlarge"
    whole = json.loads(found["SM_TRAINING_ENV"])
    assert whole["model_dir"] == "/models"
    assert whole["channel_input_dirs"] == {"train": "/data/train"}
    assert (whole["num_gpus"], whole["current_host"], whole["is_master"]) == (4, "two", False)


def test_parameters_of_the_model_parallel_library(variables):
    assert "SM_HP_MP_PARAMETERS" not in variables()
    assert not json.loads(variables()["SM_FRAMEWORK_PARAMS"])["sagemaker_mpi_enabled"]
    exported = {"SM_HP_MP_PARAMETERS": '{"partitions": 4}'}
    assert json.loads(variables(environ=exported)["SM_HP_MP_PARAMETERS"]) == {"partitions": 4}
    option = {"mp_parameters": {"pipeline_parallel_degree": 2, "ddp": True}}
    found = variables(environ=exported, **option)
    # Hugging Face's Trainer looks for "partitions" in it.
    assert json.loads(found["SM_HP_MP_PARAMETERS"]) == {**option["mp_parameters"], "partitions": 2}
    params = json.loads(found["SM_FRAMEWORK_PARAMS"])
    assert (params["sagemaker_mpi_enabled"], params["sagemaker_mpi_num_of_processes_per_host"]) == (True, 2)


def test_hyperparameters_become_words():
    given = {
        "lr": 0.1,
        "b": 8,
        "fp16": True,
        "none": None,
        "layers": [1, 2],
        "mp_parameters": {"b": 1, "a": True},
    }
    assert to_words(given) == (
        *("-b", "8", "--fp16", "True", "--layers", "[1, 2]", "--lr", "0.1"),
        *("--mp_parameters", "a=True,b=1", "--none", "None"),
    )
    assert hyperparameter_variables(given)["SM_HP_MP_PARAMETERS"] == '{"a":true,"b":1}'
    assert hyperparameter_variables({"text": "as it is"})["SM_HP_TEXT"] == "as it is"


def test_words_become_hyperparameters():
    words = ["pos", "--a", "-1.5", "--b=x=y", "-n", "2", "--flag", "--list", "[1]", "--nan", "NaN", "--"]
    assert from_words(words) == {"a": -1.5, "b": "x=y", "n": 2, "flag": True, "list": [1], "nan": "NaN"}


@pytest.mark.parametrize("value", [{1, 2}, float("nan"), object()])
def test_hyperparameters_that_json_cannot_express_are_named(value):
    with pytest.raises(ConfigError, match=r"hyperparameter model is .* which JSON cannot express"):
        with_plain_values({"model": value})
    with pytest.raises(ConfigError, match="a hyperparameter is called 3"):
        with_plain_values({3: 1})
