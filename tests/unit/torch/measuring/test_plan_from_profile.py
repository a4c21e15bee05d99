"""A plan from a profile says what the profile does not know."""

import pytest
import torch
from torch import nn

from shardwright.cluster import Cluster, Device, Link
from shardwright.config import Config
from shardwright.errors import StalePlanError
from shardwright.planner.profiles import MeasuredProfile
from shardwright.torch.units.dry_run import trace_model
from shardwright.torch.units.offline_planner import plan_model

CLUSTER = Cluster(
    device=Device(name="cpu"),
    ranks_per_node=2,
    cores_per_node=2,
    intra_node=Link(latency_s=1e-5, bandwidth_Bps=4 * 2**30),
    inter_node=Link(latency_s=1e-4, bandwidth_Bps=2**30),
)


@pytest.mark.parametrize("world", [2, 6])
def test_more_ranks_than_were_measured_are_told(world):
    model, batch = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))), torch.randn(6, 8)
    graph = trace_model(model, batch)
    profile = MeasuredProfile(
        fingerprint=graph.model_fingerprint, costs={}, cluster=CLUSTER, num_ranks=2, when="now"
    )
    config = Config.parse({"pipeline_parallel_degree": world})

    def plan(measured):
        return plan_model(model, batch, config=config, world_size=world, cluster=CLUSTER, measured=measured)

    told = [why for why in plan(profile).why if "The profile was measured" in why]
    expected = (
        "The profile was measured with 2 ranks: 6 are taken to be on 3 such hosts, with 1.0 GiB/s "
        "between them. Measure on as many to know."
    )
    assert told == ([expected] if world > 2 else [])
    with pytest.raises(StalePlanError):
        plan(profile.model_copy(update={"fingerprint": "another"}))
