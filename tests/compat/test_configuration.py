"""Settings of smp: where they come from, what each key of the library's table does, what others do."""

import json

import pytest

from shardwright.config import Config
from shardwright.errors import ConfigError
from smdistributed.modelparallel.configuration import PARAMETERS_VARIABLE, read_configuration

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
        ({"placement_strategy": "DDT"}, "placement_strategy is 'DDT', but it must be cluster"),
        ({"optimize": "time"}, "optimize is 'time', but it must be speed or memory"),
        ({"partitions": 0}, "^partitions is 0, but it must be a whole number"),
        ({"pipeline_parallel_degree": 0}, "^pipeline_parallel_degree is 0, but it must be a whole number"),
        ({"microbatches": 2.5}, "microbatches is 2.5"),
        ({"active_microbatches": True}, "active_microbatches is True"),
        ({"ddp": "yes"}, "ddp is 'yes', but it must be True or False"),
        ({"partition_file": 3}, "partition_file is 3, but it must be text"),
        ({"auto_partition": False}, "auto_partition is False, but default_partition"),
        ({"partitions": 2, "default_partition": 2}, "it must be from 0 to 1"),
        ({"memory_weight": 1.5}, "memory_weight is 1.5"),
        ({"ddp_port": 1234}, "ddp_port is 1234, but it has a meaning only with ddp"),
        ({"ddp_dist_backend": "nccl"}, "it has a meaning only with ddp"),
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
