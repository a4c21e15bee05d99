"""Settings: names, limits, contradictions, merging, the world."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.config import Config, names
from shardwright.errors import ConfigError
from shardwright.text import control_in


def problem(settings: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.parse(settings)
    return str(caught.value)


def test_defaults() -> None:
    config = Config.parse(None)
    assert config.pins == {}
    assert config.pipeline == "auto"
    assert config.optimize == "speed"
    assert config.auto_partition is True
    assert config.placement_strategy == "DPT"
    assert config.activation_checkpointing == "auto"
    assert config.profile == "measured"
    assert config.timeout_s == 300.0
    assert (config.pipeline_parallel_degree, config.microbatches, config.ignored) == (None, None, ())


def test_every_setting_has_a_meaning() -> None:
    for name, field in Config.model_fields.items():
        assert field.description, name


def test_what_the_planner_does_not_look_at_pins_nothing() -> None:
    """A plan said that its choice was fixed by `report False`."""
    assert Config.parse({"report": False, "ddp_port": 1234, "seed": 3, "microbatches": 4}).pins == {
        "microbatches": 4
    }


def test_smp_dictionary() -> None:
    config = Config.parse(
        {
            "partitions": 2,
            "microbatches": 4,
            "pipeline": "interleaved",
            "optimize": "memory",
            "placement_strategy": "spread",
            "ddp": True,
            "contiguous": True,
            "deterministic_server": True,
            "fp16": False,
            "tensor_parallel_degree": 1,
            "_match_weights": True,
        }
    )
    assert config.pipeline_parallel_degree == 2
    assert config.pipeline == "1f1b"
    assert config.placement_strategy == "TPD"
    assert config.ignored == ("contiguous", "deterministic_server", "_match_weights")
    assert config.pins == {
        "pipeline_parallel_degree": 2,
        "microbatches": 4,
        "pipeline": "1f1b",
        "optimize": "memory",
        "placement_strategy": "TPD",
    }
    assert Config.parse({"ddp": False}).data_parallel_degree == 1


@pytest.mark.parametrize(
    ("pipeline", "kind"),
    [
        ("simple", "gpipe"),
        ("interleaved", "1f1b"),
        ("interleaved_1f1b", "interleaved_1f1b"),
        ("zb_v", "zb_v"),
    ],
)
def test_pipeline_names(pipeline: str, kind: str) -> None:
    assert Config.parse({"pipeline": pipeline}).pipeline == kind


@pytest.mark.parametrize(("given", "stored"), [(True, "full"), (False, "none"), ("auto", "auto")])
def test_activation_checkpointing(given: Any, stored: str) -> None:
    assert Config.parse({"activation_checkpointing": given}).activation_checkpointing == stored


def test_balance_weight() -> None:
    assert Config.parse({}).balance_weight == 0.0
    assert Config.parse({"optimize": "memory"}).balance_weight == 0.8
    assert Config.parse({"optimize": "memory", "memory_weight": 0.5}).balance_weight == 0.5


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("microbatchs", "microbatches"),
        ("pipeline-paralel-degree", "pipeline_parallel_degree"),
        ("partition", "partitions"),
        ("tensor_parallel_degre", "tensor_parallel_degree"),
        ("memory_limits", "memory_limit"),
    ],
)
def test_unknown_key(key: str, suggestion: str) -> None:
    assert problem({key: 1}) == f"{key} is not a setting. Did you mean {suggestion}?"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"microbatches": 0}, "microbatches is 0, but it must be at least 1."),
        ({"microbatches": "four"}, "microbatches is 'four', but it must be a whole number."),
        ({"microbatches": True}, "microbatches is True, but it must be a number."),
        ({"memory_weight": 1.5}, "memory_weight is 1.5, but it must be at most 1.0."),
        ({"memory_limit": "much"}, "memory_limit is 'much', but it must be a size such as 6GiB or 500MB"),
        ({"memory_limit": 0}, "memory_limit is 0, but it must be a size"),
        ({"memory_limit": 8}, "memory_limit is 8, but 8 means bytes, which holds no model: write a unit"),
        ({"timeout_s": 0}, "timeout_s is 0, but it must be at least 0.001."),
        ({"optimize": "money"}, "optimize is 'money', but it must be one of 'speed' or 'memory'."),
        ({"pipeline": "_only_forward"}, "pipeline is '_only_forward', but it must be one of 'auto', 'gpipe'"),
        ({"auto_partition": "maybe"}, "auto_partition is 'maybe', but it must be true or false."),
        (
            {"placement_strategy": "DPP"},
            "placement_strategy is 'DPP', but it must be cluster, spread or a perm",
        ),
        ({"ddp_dist_backend": "smddp"}, "ddp_dist_backend is 'smddp', but it must be one of 'auto', 'nccl'"),
        ({"ddp_port": 70000}, "ddp_port is 70000, but it must be at most 65535."),
    ],
)
def test_out_of_range(settings: dict[str, Any], text: str) -> None:
    assert problem(settings).startswith(text)


@pytest.mark.parametrize(
    ("removed", "remedy"),
    [
        ("missing_ranks_s", "a thirtieth of timeout_s"),
        ("plan_anew", "Set plan to anew."),
        ("keep_freed_memory", "freed memory is kept for the next step"),
        ("sdp_reduce_every_microbatch", "reduce_every_microbatch in a plan file demands it"),
        ("offload_dir", "TMPDIR"),
        ("allow_older", "resume(allow_older=True)"),
    ],
)
def test_a_removed_setting_names_what_to_use(removed: str, remedy: str) -> None:
    assert remedy in problem({removed: 1})


@pytest.mark.parametrize(
    "settings",
    [
        {"fp16_params": True},
        {"prescaled_batch": True},
    ],
)
def test_features_of_later_versions(settings: dict[str, Any]) -> None:
    (key, value), *_ = settings.items()
    assert problem(settings).startswith(f"{key} is {value!r}, but this version does not have it yet")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"partitions": 2, "pipeline_parallel_degree": 4},
            "partitions is 2, but pipeline_parallel_degree is 4: they are two names of one setting.",
        ),
        ({"auto_partition": False}, "auto_partition is false, but default_partition is not set"),
        (
            {"auto_partition": False, "default_partition": 2, "partitions": 2},
            "default_partition is 2, but pipeline_parallel_degree is 2: pipeline ranks run from 0 to 1.",
        ),
        ({"load_partition": True}, "load_partition is true, but no file is given."),
        (
            {"load_partition": False, "partition_file": "a.json"},
            "load_partition is false, but partition_file is",
        ),
        ({"plan": "a.json", "partition_file": "b.json"}, "partition_file is 'b.json', but plan is 'a.json'"),
        ({"ddp": False, "data_parallel_degree": 2}, "ddp is false, but data_parallel_degree is 2."),
        ({"ddp": "perhaps"}, "ddp is 'perhaps', but it must be true or false."),
        ({"pipeline": "interleaved", "virtual_stages": 2}, "virtual_stages is 2, but pipeline 1f1b runs one"),
        ({"pipeline": "zb_v", "virtual_stages": 3}, "virtual_stages is 3, but pipeline zb_v runs 2 stages"),
        (
            {"auto_partition": False, "default_partition": 0, "virtual_stages": 1},
            "virtual_stages is 1, but auto_partition is false",
        ),
        (
            {"tensor_parallel_degree": 2, "context_parallel_degree": 2, "expert_parallel_degree": 2},
            "context_parallel_degree 2 and expert_parallel_degree 2 and tensor_parallel_degree 2 are set",
        ),
    ],
)
def test_contradictions(settings: dict[str, Any], text: str) -> None:
    assert problem(settings).startswith(text)


def test_all_problems_at_once() -> None:
    text = problem({"microbatches": 0, "optimize": "money", "nonsense": 1, "prescaled_batch": True})
    assert text.splitlines()[0] == "4 settings cannot be used:"
    assert len(text.splitlines()) == 5


def test_merge_takes_the_last_and_knows_aliases() -> None:
    config = Config.merge(
        {"partitions": 2, "microbatches": 4, "seed": 1, "static_mode": True, "horovod": True},
        None,
        Config.parse({"seed": 2}),
        {"pipeline_parallel_degree": 4, "microbatches": None},
    )
    assert (config.pipeline_parallel_degree, config.microbatches, config.seed) == (4, None, 2)
    assert config.ignored == ("static_mode", "horovod")


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "partitions": st.integers(1, 64),
            "microbatches": st.integers(1, 64),
            "pipeline": st.sampled_from(["simple", "interleaved", "zb_h1", "auto"]),
            "memory_limit": st.sampled_from(["6GiB", 123_000, "1.5 GB"]),
            "placement_strategy": st.sampled_from(["cluster", "spread", "PTD"]),
            "static_mode": st.booleans(),
            "memory_weight": st.floats(0, 1),
            "run_name": st.text().filter(lambda name: control_in(name) is None),
        },
    )
)
def test_round_trip(settings: dict[str, Any]) -> None:
    config = Config.parse(settings)
    again = Config.parse(json.loads(config.to_json()))
    assert again == config
    assert again.pins == config.pins


def test_world_gives_the_missing_degree() -> None:
    assert Config.parse({"partitions": 2}).resolve_world(8).data == 4
    assert Config.parse({"data_parallel_degree": 2}).resolve_world(8).pipeline == 4
    mesh = Config.parse({"placement_strategy": "spread"}).resolve_world(4)
    assert (mesh.pipeline, mesh.data, mesh.placement) == (4, 1, "TPD")


@pytest.mark.parametrize(
    ("settings", "world_size", "equation"),
    [
        ({"partitions": 3}, 4, "pipeline(3) * data(?) != WORLD_SIZE(4). Start a multiple of 3 ranks"),
        ({"data_parallel_degree": 3}, 4, "pipeline(?) * data(3) != WORLD_SIZE(4)"),
        (
            {"partitions": 2, "data_parallel_degree": 3},
            4,
            "pipeline(2) * data(3) != WORLD_SIZE(4). Start 6 ranks",
        ),
    ],
)
def test_degrees_that_do_not_fit_the_world(settings: dict[str, Any], world_size: int, equation: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.parse(settings).resolve_world(world_size)
    assert str(caught.value).startswith(equation)
    assert str(caught.value).endswith("choose degrees whose product divides 4, each one of 1, 2, 4.")


def test_tensor_and_context_degrees_go_together() -> None:
    mesh = Config.parse({"tensor_parallel_degree": 2, "context_parallel_degree": 2}).resolve_world(8)
    assert (mesh.pipeline, mesh.context, mesh.tensor) == (2, 2, 2)
    assert mesh.group("tp", 0) == (0, 1)


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("schedule", "Did you mean pipeline?"),
        ("tp", "Did you mean tensor_parallel_degree?"),
        ("num_stages", "Did you mean pipeline_parallel_degree?"),  # by letters alone: virtual_stages
        ("micro_batch_size", "microbatches says into how many parts it is cut"),
        ("gradient_accumulation_steps", "call optimizer.step() after as many steps"),
    ],
)
def test_words_of_other_libraries_name_what_is_meant(word: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(advice)):
        Config.parse({word: 2})


def test_advice_on_words_of_other_libraries_names_settings_that_exist() -> None:
    advised = {*names._DEGREES, *names._SETTINGS}
    assert advised <= set(Config.model_fields)
    assert not set(names._WORDS) & set(Config.model_fields), "a setting is advised against itself"
