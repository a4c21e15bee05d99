"""Parameters of SageMaker's model parallel library: one test for each rule, one message each."""

import json
import subprocess
import sys

import pytest

from shardwright.errors import ConfigError
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


@pytest.mark.parametrize("value", ["simple", "interleaved", "_only_forward", "1f1b", "zb_v"])
def test_pipelines(value):
    accepts(pipeline=value)


@pytest.mark.parametrize("value", ["cluster", "spread", "DPT", "TPD", "PTD", "DTP", "TDP", "PDT"])
def test_placement_strategies(value):
    accepts(placement_strategy=value)


def test_optimize():
    accepts(optimize="memory")
    assert problem(optimize="both") == "optimize is 'both', but it must be speed or memory."


@pytest.mark.parametrize("key", ["microbatches", "partitions", "active_microbatches"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True])
def test_counts_are_whole_numbers_of_at_least_1(key, value):
    assert f"{key} is {value!r}, but it must be a whole number of at least 1" in problem(**{key: value})


@pytest.mark.parametrize(
    "key", ["auto_partition", "contiguous", "load_partition", "horovod", "ddp", "deterministic_server"]
)
@pytest.mark.parametrize("value", [1, "true"])
def test_flags_are_bools(key, value):
    assert f"{key} is {value!r}, but it must be True or False" in problem(**{key: value})


def test_a_partition_by_hand_needs_a_default():
    assert problem(auto_partition=False).startswith("auto_partition is False, but default_partition does not")
    accepts(auto_partition=False, default_partition=1)


@pytest.mark.parametrize("value", [0, 0.2, 1])
def test_memory_weights(value):
    accepts(memory_weight=value)


@pytest.mark.parametrize(("key", "value"), [("ddp_port", 8888), ("ddp_dist_backend", "nccl")])
def test_settings_of_ddp_need_ddp(key, value):
    assert f"{key} is {value!r}, but it has a meaning only with ddp" in problem(**{key: value})
    assert "only with ddp" in problem(**{key: value, "ddp": False})
    accepts(**{key: value, "ddp": True})


def test_what_ranks_take_is_taken_before_anything_starts():
    accepts(ddp=True, tensor_parallel_degree=2)
    accepts(horovod=True)


def test_ddp_and_horovod_exclude_each_other():
    assert "ddp and horovod are both True" in problem(ddp=True, horovod=True)


def test_an_estimator_needs_the_number_of_partitions_under_either_name():
    with pytest.raises(ConfigError, match=r'partitions is missing.*Add "partitions": 2'):
        check_smp_parameters({"microbatches": 4}, needs_degree=True)
    check_smp_parameters({"microbatches": 4})
    check_smp_parameters({"pipeline_parallel_degree": 2}, needs_degree=True)
    check_smp_parameters({"sharded_data_parallel_degree": 2, "ddp": True}, needs_degree=True)


def test_the_two_names_of_the_number_of_partitions_agree():
    accepts(pipeline_parallel_degree=2)
    assert "partitions is 2 and pipeline_parallel_degree is 4" in problem(pipeline_parallel_degree=4)


def test_all_problems_are_told_at_once():
    text = problem(pipeline="x", optimize="y", ddp=1)
    assert text.startswith("3 parameters of the model parallel library cannot be used:\n")
    assert all(f"\n  {key} is " in text for key in ("pipeline", "optimize", "ddp"))


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


def test_no_framework_is_imported():
    code = (
        "import sys, shardwright.launch.ranks.smp_parameters; print({'torch', 'numpy'} & sys.modules.keys())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"
