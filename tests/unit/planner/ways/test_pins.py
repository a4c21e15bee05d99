"""Pins as text."""

import pytest

from shardwright.cluster import parse_inventory
from shardwright.errors import ConfigError
from shardwright.planner.ways.space import parse_pins


def test_names_of_others_and_values_by_name():
    text = [
        "tensor_parallel_degree=8",
        "PP=4,schedule=1F1B",
        "recompute=full, offload=optimizer",
        "sharded=3",
    ]
    assert parse_pins(text) == {
        "tensor": 8,
        "pipeline": 4,
        "schedule": 1,
        "recompute": 2,
        "offload": 1,
        "sharded": 3,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensor", "'tensor' is no option and value"),
        ("tensro=2", "'tensro' is no option of a topology; did you mean tensor"),
        ("zzz=2", "they are tensor, pipeline"),
        ("tensor=two", "tensor is 'two', but it must be a whole number"),
        ("tensor=-2", "tensor is '-2'"),
        ("recompute=some", "must be one of none, selective, full"),
        ("sharded=7", "sharded is 7, but it must be from 0 to 3"),
        ("tensor=2,tp=4", "tensor is given as 2 and as 4"),
        ("expert_parallel_degree=4", "is a setting, which does not count the ranks of a sequence"),
        ("expert_parallel_degree=4,context=2,ep=4", "is expert=8 with context=2, but expert is given as 4"),
        ("expert_parallel_degree=4,expert_parallel_degree=2", "is given as 4 and as 2. Give it once"),
    ],
)
def test_what_is_no_pin(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_pins([text])


@pytest.mark.parametrize(("text", "experts"), [("context=1", 4), ("context=2", 8), ("context=2,expert=8", 8)])
def test_experts_as_a_setting_counts_them(text, experts):
    """Bug: taken for the pin, which counts the ranks of a sequence as well: the way had another setting."""
    for pins in ([f"expert_parallel_degree=4,{text}"], [text, "expert-parallel-degree=4"]):
        assert parse_pins(pins)["expert"] == experts
    assert parse_pins(["expert_parallel_degree=1"]) == {"expert": 1}


def test_numbers_of_thousands_of_digits_are_refused_shortly():
    many = "9" * 5000
    with pytest.raises(ConfigError, match="at most 12 digits") as refused:
        parse_pins([f"tensor={many}"])
    assert len(str(refused.value)) < 200
    with pytest.raises(ConfigError, match="is not a number of nodes") as refused:
        parse_inventory(f"p4d.24xlarge*{many}")
    assert len(str(refused.value)) < 400
