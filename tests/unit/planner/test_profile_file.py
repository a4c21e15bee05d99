"""Measured costs, as a file; profiles without measurement; fingerprints of graphs."""

import json
from dataclasses import fields, replace

import pytest
from graphs import GraphBuilder, chain_graph

from shardwright.cluster import Cluster, Device, HostCosts, Link
from shardwright.errors import ConfigError
from shardwright.plan import StagePrediction
from shardwright.planner import estimate_profile
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
    assert {field.name for field in fields(Cost)} <= set(StagePrediction.model_fields)


DEVICE = Device(name="paper", flops_per_s=1e9, memory_Bps=1e6, overhead_s=1e-3)


def test_roofline_adds_up() -> None:
    builder = GraphBuilder()
    weight = builder.parameter("w", 600)
    a = builder.unit("a", output_bytes=200, cost_class="a", requires_grad=False)
    b = builder.unit("b", [a], output_bytes=200, parameters=[weight], cost_class="b", flops=7 * 10**8)
    profile = estimate_profile(builder.graph(loss=b), device=DEVICE)
    cost = profile.costs["b"]
    # 1 ms overhead + 0.7 GFLOP at 70 % of 1 GFLOP/s + 1000 bytes at 1 MB/s.
    assert cost.forward_s == pytest.approx(0.001 + 1.0 + 0.001)
    assert cost.backward_s == pytest.approx(2 * (0.001 + 1.0) + 1.6 * 0.001)
    assert cost.weight_s == pytest.approx(1.0)
    assert (cost.input_bytes, cost.flops) == (200, 7 * 10**8)
    assert cost.provenance == "estimated"
    assert profile.device == "paper"


def test_a_backward_that_leaves_nothing_for_later_is_in_one_piece() -> None:
    """Under autocast a zero-bubble schedule was chosen for a split that does not happen."""
    builder = GraphBuilder()
    weight = builder.parameter("w", 600)
    graph = builder.graph(loss=builder.unit("a", parameters=[weight], cost_class="a", flops=7 * 10**8))
    whole = replace(graph, nodes=tuple(replace(node, weight_bytes=0) for node in graph.nodes))
    split, in_one = (estimate_profile(each, device=DEVICE).costs["a"] for each in (graph, whole))
    assert split.weight_s > 0
    assert in_one.weight_s == 0.0
    assert in_one.backward_s == split.backward_s


def test_no_backward_without_gradients() -> None:
    builder = GraphBuilder()
    a = builder.unit("a", requires_grad=False)
    assert estimate_profile(builder.graph(loss=a), device=DEVICE).costs["block"].backward_s == 0.0


def test_fingerprints_tell_graphs_apart() -> None:
    prints = {chain_graph(2).fingerprint, chain_graph(3).fingerprint, chain_graph(2, tied=True).fingerprint}
    assert len(prints) == 3
    assert chain_graph(2).fingerprint == chain_graph(2).fingerprint
    # The batch is part of the graph, not of the model.
    wide = chain_graph(2, output_bytes=80)
    assert wide.fingerprint != chain_graph(2).fingerprint
    assert wide.model_fingerprint == chain_graph(2).model_fingerprint
