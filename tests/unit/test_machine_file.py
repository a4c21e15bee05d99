"""Machines as a file."""

import textwrap

import pytest

from shardwright.cluster import Link, machine_file
from shardwright.cluster.machine_file import read_cluster
from shardwright.errors import ConfigError


def write(tmp_path, text):
    file = tmp_path / "machine.yaml"
    file.write_text(text)
    return file


def test_the_example_of_the_docstring_is_read(tmp_path):
    text = textwrap.dedent(machine_file.__doc__.split("::", 1)[1])
    found = read_cluster(write(tmp_path, text))
    assert found.device.name == "A100-SXM4-40GB"
    assert found.device.memory_bytes == 40 * 2**30
    assert found.device.flops_per_s == 312e12
    assert (found.ranks_per_node, found.cores_per_node) == (8, 0)
    assert found.intra_node == Link(latency_s=5e-6, bandwidth_Bps=250e9)
    assert found.inter_node == Link(latency_s=2e-5, bandwidth_Bps=12.5e9)


SHORT = """
device: {flops_per_s: 1e12, memory_Bps: 1e11}
ranks_per_node: 2
intra_node: {latency_s: 1e-6, bandwidth_Bps: 1e10}
"""


def test_without_a_link_between_hosts_it_is_that_inside_one(tmp_path):
    found = read_cluster(write(tmp_path, SHORT))
    assert found.inter_node == found.intra_node
    assert found.device.memory_bytes == 0


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (
            SHORT.replace("memory_Bps: 1e11", "memory: many"),
            ["device.memory_Bps is missing", "such as 40GiB"],
        ),
        (SHORT.replace("1e12", "0"), ["device.flops_per_s is 0, but it must be more than 0"]),
        (SHORT + "gpus: 2", ["gpus is not a field"]),
        ("- 1", ["must be an object"]),
        ("a: [", ["is no YAML: line 2, column 1"]),
    ],
)
def test_all_that_is_wrong_is_named(tmp_path, text, messages):
    with pytest.raises(ConfigError) as raised:
        read_cluster(write(tmp_path, text))
    for message in (*messages, "machine.yaml"):
        assert message in str(raised.value)


def test_a_missing_file():
    with pytest.raises(ConfigError, match=r"machine file gone\.yaml cannot be read: No such file"):
        read_cluster("gone.yaml")
