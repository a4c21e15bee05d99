"""The rate at which ranks offload: measured where the planner may choose, or the settings ask for it."""

from types import SimpleNamespace

import pytest
import torch

from shardwright.cluster import Cluster, Device, Link
from shardwright.config import Config
from shardwright.errors import UsageError
from shardwright.torch.offload import offloading
from shardwright.torch.offload.disk import DiskTier

CLUSTER = Cluster(
    device=Device(name="test"),
    ranks_per_node=1,
    intra_node=Link(latency_s=1e-5, bandwidth_Bps=1e9),
    inter_node=Link(latency_s=1e-5, bandwidth_Bps=1e9),
)


def a_run(**settings):
    """What `with_tier` knows of a run of one rank."""
    config = Config.parse({"run_dir": "off", **settings})
    return SimpleNamespace(
        config=config,
        device=torch.device("cpu"),
        mesh=SimpleNamespace(world_size=1),
        from_all_ranks=lambda fact: [fact],
        rank=0,
    )


@pytest.mark.parametrize("wanted", [True, "auto"])
def test_a_file_is_measured(tmp_path, monkeypatch, wanted):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    host = offloading.with_tier(a_run(offload_activations=wanted), CLUSTER).host
    assert 1e6 < host.bandwidth_Bps < 1e12
    assert 0 < host.occupancy <= 1
    assert list(tmp_path.iterdir()) == []


def test_a_tier_without_room(monkeypatch, caplog):
    def full(tier, memory):
        raise UsageError("the disk is full")

    monkeypatch.setattr(DiskTier, "write", full)
    with pytest.raises(UsageError, match="the disk is full"):
        offloading.with_tier(a_run(offload_activations=True), CLUSTER)
    assert offloading.with_tier(a_run(offload_activations="auto"), CLUSTER) is CLUSTER
    assert "nothing is offloaded: rank 0: the disk is full" in caplog.text


def test_the_slowest_rank_counts():
    link = offloading._slowest([(2e9, 0.5), (1e9, 0.2)])
    assert (link.bandwidth_Bps, link.occupancy) == (1e9, 0.5)
