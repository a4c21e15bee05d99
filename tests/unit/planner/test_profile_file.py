"""Measured costs, as a file."""

import json
from dataclasses import fields

import pytest

from shardwright.cluster import Cluster, Device, HostCosts, Link
from shardwright.errors import ConfigError
from shardwright.plan import CostRecord
from shardwright.planner.profiles import MeasuredProfile
from shardwright.profile import Cost, UnitCost


@pytest.fixture
def profile():
    link = Link(latency_s=1e-5, bandwidth_Bps=1e9, occupancy=0.5)
    return MeasuredProfile(
        fingerprint="f",
        costs={"Linear-1": UnitCost(forward_s=1e-3, backward_s=2e-3, input_s=1e-3, provenance="measured")},
        cluster=Cluster(
            device=Device(name="cpu"),
            ranks_per_node=2,
            intra_node=link,
            inter_node=link,
            host_costs=HostCosts(step_s=2e-3, action_s=3e-4, unit_s=1e-5, operation_s=7e-6),
        ),
        num_ranks=2,
        when="2026-11-23 12:00 UTC",
    )


def test_what_is_written_is_read(profile, tmp_path):
    profile.write(tmp_path / "p.json")
    assert MeasuredProfile.read(tmp_path / "p.json") == profile


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"version": 2}, "version"),
        ({"format": "shardwright-prices"}, "format"),
        ({"costs": {"Linear-1": {"forward_s": -1, "backward_s": 1}}}, r"costs.Linear-1.forward_s is -1"),
        ({"costs": {"Linear-1": {"forward_s": "NaN", "backward_s": 1}}}, "costs.Linear-1.forward_s"),
        (
            {"costs": {"Linear-1": {"forward_s": 1e7, "backward_s": 1}}},
            "forward_s is 10000000.0.* at most 1000000",
        ),
        ({"costs": {"Linear-1": {"forward_s": 1, "backward_s": 1, "work_bytes": 2**61}}}, "work_bytes is"),
        ({"costs": {"Linear-1": {"forward_s": True, "backward_s": 1}}}, "forward_s is True.* a number"),
        ({"costs": {"Linear-1": {"forward_s": 1, "backward_s": 1, "x": 1}}}, "x is not a field"),
        ({"cluster": 3}, "cluster is 3, but it must be an object"),
        ({"num_ranks": 0}, "num_ranks is 0"),
        ({"more": 1}, "more is not a field"),
    ],
)
def test_what_is_wrong_is_named(profile, change, names, tmp_path):
    profile.write(tmp_path / "p.json")
    document = json.loads((tmp_path / "p.json").read_text())
    (tmp_path / "p.json").write_text(json.dumps({**document, **change}))
    with pytest.raises(ConfigError, match=names):
        MeasuredProfile.read(tmp_path / "p.json")


def test_a_file_that_is_cut_off_or_missing(profile, tmp_path):
    profile.write(tmp_path / "p.json")
    text = (tmp_path / "p.json").read_text()
    (tmp_path / "cut.json").write_text(text[:-20])
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    for name in ("cut.json", "bytes.json", "none.json", "."):
        with pytest.raises(ConfigError, match="profile"):
            MeasuredProfile.read(tmp_path / name)


def test_files_have_all_that_costs_have():
    """A field of a cost that a file lacks would be lost on the way."""
    assert {field.name for field in fields(Cost)} == set(CostRecord.model_fields)
