"""Machines in a file; machines by name; what a host has, and what a container leaves of it."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cluster import (
    Accelerator,
    Inventory,
    NodeKind,
    Rate,
    find_machines,
    node_kinds,
    parse_inventory,
)
from shardwright.cluster.cluster_file import read_inventory, write_inventory
from shardwright.cluster.named import THIS_CPU, host_memory_bytes
from shardwright.costs import calibration_of, calibration_of_nodes
from shardwright.costs.run_cluster import cluster_of
from shardwright.errors import ConfigError

RATES = st.floats(1e3, 1e18)
NAMES = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Cf", "Zl", "Zp")), min_size=1, max_size=20
)


@st.composite
def accelerators(draw):
    dtypes = draw(st.lists(st.sampled_from(["float32", "bfloat16", "float16"]), min_size=1, unique=True))
    rate = st.builds(
        Rate, rows=st.integers(1, 9999), inner=st.just(64), columns=st.just(64), alone=RATES, together=RATES
    )
    return Accelerator(
        name=draw(NAMES),
        family=draw(NAMES),
        flops_per_s={dtype: draw(RATES) for dtype in dtypes},
        memory_bytes=draw(st.integers(1, 2**50)),
        memory_Bps=draw(RATES),
        host_Bps=draw(st.one_of(st.just(0.0), RATES)),
        source=draw(st.sampled_from(["data sheet", "measured", "typical"])),
        products=draw(st.dictionaries(st.just("float32"), st.lists(rate, min_size=1, max_size=3).map(tuple))),
    )


kinds = st.builds(
    NodeKind,
    name=NAMES,
    accelerator=accelerators(),
    num_accelerators=st.integers(1, 64),
    link_Bps=RATES,
    link_latency_s=st.floats(0, 1),
    network_Bps=RATES,
    network_latency_s=st.floats(0, 1),
    memory_bytes=st.integers(0, 2**50),
    cores=st.integers(0, 512),
    price_per_hour=st.one_of(st.none(), st.floats(0, 1e6)),
    price_source=NAMES,
    source=st.just("measured"),
)
inventories = st.builds(
    Inventory,
    name=NAMES,
    nodes=st.lists(st.tuples(kinds, st.integers(1, 100_000)), min_size=1, max_size=3).map(tuple),
    between_kinds_Bps=st.one_of(st.none(), RATES),
    measured=st.one_of(st.just(""), NAMES),
    collectives=st.one_of(st.just({}), st.just({"all_reduce": ((1024, 1e-5), (2048, 2e-5))})),
)


@given(machines=inventories)
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read(machines, tmp_path_factory):
    file = tmp_path_factory.mktemp("cluster") / "cluster.yaml"
    write_inventory(file, machines)
    assert read_inventory(file) == machines


@pytest.mark.parametrize("name", sorted(node_kinds()))
def test_machines_that_are_known_by_name(name, tmp_path):
    write_inventory(tmp_path / "c.yaml", find_machines(f"{name}*2"))
    assert find_machines(str(tmp_path / "c.yaml")) == find_machines(f"{name}*2")
    (tmp_path / "named.yaml").write_text(f"cluster_version: 1\nnodes: [{{kind: {name}, number: 2}}]\n")
    assert find_machines(str(tmp_path / "named.yaml")) == find_machines(f"{name}*2")
    assert cluster_of(find_machines(name), dtype="float16").ranks_per_node >= 1


GOOD = """
cluster_version: 1
nodes:
- name: box
  accelerators: 4
  accelerator:
    name: chip
    family: chips
    memory: 24GiB
    memory_Bps: 1.0e+12
    flops_per_s: {bfloat16: 1.6e+14}
  link_Bps: 2.5e+10
  network_Bps: 1.25e+9
"""


def test_a_file_by_hand(tmp_path):
    (tmp_path / "c.yaml").write_text(GOOD)
    ((kind, number),) = read_inventory(tmp_path / "c.yaml").nodes
    assert (kind.accelerator.memory_bytes, number) == (24 * 2**30, 1)
    assert cluster_of(read_inventory(tmp_path / "c.yaml"), dtype="bfloat16").device.flops_per_s == 1.6e14
    with pytest.raises(ConfigError, match="chip has no rate for float32; take one of bfloat16"):
        cluster_of(read_inventory(tmp_path / "c.yaml"), dtype="float32")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("cluster_version: 1", "cluster_version: 2", "cluster_version 2, but this version reads 1"),
        ("cluster_version: 1", "", "cluster_version None"),
        ("accelerators: 4", "accelerators: 0", "nodes.0.accelerators is 0, but it must be at least 1"),
        ("accelerators: 4", "accelerators: 4\n  number: 0", "nodes.0.number is 0, but it must be at least 1"),
        ("accelerators: 4", "accelerators: 4\n  number: 1000001", "nodes.0.number is 1000001"),
        ("2.5e+10", ".nan", "nodes.0.link_Bps is nan, but it must be a finite number"),
        ("2.5e+10", ".inf", "nodes.0.link_Bps is inf"),
        ("2.5e+10", "-1", "nodes.0.link_Bps is -1, but it must be more than 0"),
        ("2.5e+10", "1.0e+300", "nodes.0.link_Bps is 1e+300"),
        ("24GiB", "0", "nodes.0.accelerator.memory is 0, but it must be more than 0"),
        (
            "accelerators: 4",
            "accelerators: 9999",
            "nodes.0.accelerators is 9999, but it must be at most",
        ),
        ("name: box", "name: !!timestamp 2026-99-99", "is no YAML"),
        ("24GiB", "many", "nodes.0.accelerator.memory is 'many', but it must be a size such as 40GiB"),
        ("24GiB", "9e999TiB", "nodes.0.accelerator.memory"),
        ("family: chips", "families: chips", "nodes.0.accelerator.families is not a field"),
        ("- name: box", "- kind: p4", "nodes.0.accelerators is not a field"),
        ("name: box", "name: &a box\n  price_source: *a", "it has an alias"),
        (GOOD, "cluster_version: 1\nnodes: []", "there must be 1 to 1000 kinds of nodes"),
        (GOOD, "[1, 2]", "holds no fields"),
        (GOOD, "a: [", "is no YAML"),
        (GOOD, "!!python/object/apply:os.system [echo]", "is no YAML"),
    ],
)
def test_what_is_wrong_is_named(before, after, message, tmp_path):
    assert before in GOOD
    (tmp_path / "c.yaml").write_text(GOOD.replace(before, after, 1))
    with pytest.raises(ConfigError) as found:
        read_inventory(tmp_path / "c.yaml")
    assert message in str(found.value)


def test_every_kind_has_rates_that_can_be():
    kinds = node_kinds()
    assert {"p3.16xlarge", "p3dn.24xlarge", "p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge"} <= set(kinds)
    assert {"dgx-a100-80gb", "dgx-h100", "dgx-h200", "dgx-b200", "rtx4090x4"} <= set(kinds)
    assert {"p5e.48xlarge", "p5en.48xlarge", "p6-b200.48xlarge", "p6-b300.48xlarge"} <= set(kinds)
    assert {"p6e-gb200.36xlarge", "u-p6e-gb200x72", "g6e.48xlarge", "nd-mi300x-v5"} <= set(kinds)
    assert {"rtx5090x4", "rtx-pro-6000x4"} <= set(kinds)
    for kind in (kind for name, kind in kinds.items() if name != THIS_CPU):
        device = kind.accelerator
        assert 1e12 < min(device.flops_per_s.values()) <= max(device.flops_per_s.values()) < 1e16
        assert 10 * 2**30 < device.memory_bytes < kind.memory_bytes
        assert kind.network_Bps < kind.num_accelerators * kind.link_Bps
        assert 1e10 < kind.link_Bps < 1e12
        assert (kind.price_per_hour is None) == (kind.price_source == "")


@pytest.mark.parametrize(
    ("name", "ranks", "flops_per_s"),
    [
        ("p6-b200.48xlarge", 8, 2250e12),
        ("p6-b300.48xlarge", 8, 2250e12),
        ("p6e-gb200.36xlarge", 4, 2500e12),
        ("u-p6e-gb200x72", 72, 2500e12),
        ("nd-mi300x-v5", 8, 1307.4e12),
        ("g6e.48xlarge", 8, 362e12),
        ("rtx5090x4", 4, 209.5e12),
        ("rtx-pro-6000x4", 4, 503.8e12),
    ],
)
def test_a_family_that_nobody_measured_has_the_wide_interval(name, ranks, flops_per_s):
    kind = node_kinds()[name]
    assert (kind.num_accelerators, kind.accelerator.flops_per_s["bfloat16"]) == (ranks, flops_per_s)
    calibration = calibration_of_nodes(kind)
    measured = calibration_of_nodes(node_kinds()["p5.48xlarge"])
    assert calibration.provenance.startswith(f"not calibrated for {kind.accelerator.family}")
    assert calibration.spread >= measured.spread > calibration_of("H100", "megatron").spread


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("p4.24xlarge", r"no machines called 'p4.24xlarge'; did you mean p4d\.24xlarge"),
        ("zzzz", r"known are p3\.16xlarge"),
        ("dgx-h100*0", "'0' in 'dgx-h100.0' is not a number of nodes: take 1 to 100000"),
        ("dgx-h100*-1", "'-1'"),
        ("dgx-h100*1e9", "'1e9'"),
        ("dgx-h100*999999999999", "take 1 to 100000"),
        ("", "is not a kind of node"),
        ("dgx-h100 +", "is not a kind of node"),
    ],
)
def test_what_is_no_machine(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_inventory(text)


WHOLE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("max\n", WHOLE), ("1073741824\n", 2**30), (str(2**63), WHOLE), ("damaged", WHOLE), ("", WHOLE)],
)
def test_a_limit_of_the_container_counts(tmp_path, text, expected):
    (tmp_path / "memory.max").write_text(text)
    assert host_memory_bytes((str(tmp_path / "memory.max"), str(tmp_path / "none"))) == expected


def test_of_two_limits_the_smaller_counts(tmp_path):
    for name, size in (("a", 2**31), ("b", 2**30)):
        (tmp_path / name).write_text(str(size))
    assert host_memory_bytes((str(tmp_path / "a"), str(tmp_path / "b"))) == 2**30
