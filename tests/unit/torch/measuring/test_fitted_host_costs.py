"""What the library takes beside computing, by steps of toys."""

from types import SimpleNamespace

import pytest

from shardwright.cluster import Cluster, Device, HostCosts, Link
from shardwright.torch.measuring.host_costs import Toy, fitted, with_host_costs

COSTS = HostCosts(step_s=2e-3, action_s=3e-4, unit_s=2e-5, operation_s=1e-5)


def step_s(toy: Toy, costs: HostCosts = COSTS) -> float:
    script_s = costs.script_s(units=toy.units, operations=toy.operations)
    return costs.step_s + toy.microbatches * (2 * costs.action_s + script_s)


def test_costs_are_told_apart():
    toys = [Toy(2, 0, 2), Toy(2, 0, 6), Toy(18, 0, 4), Toy(2, 32, 4)]
    found = fitted({toy: step_s(toy) for toy in toys})
    assert found.step_s == pytest.approx(COSTS.step_s)
    assert found.action_s == pytest.approx(COSTS.action_s)
    assert found.unit_s == pytest.approx(COSTS.unit_s)
    assert found.operation_s == pytest.approx(COSTS.operation_s)


@pytest.mark.parametrize(
    ("profile", "device", "share"), [("estimated", "cpu", 1), ("measured", "cuda", 1), ("measured", "cpu", 2)]
)
def test_costs_stay_what_is_usual_where_they_are_not_measured(profile, device, share):
    """Tests of placements rest on fixed prices."""
    link = Link(latency_s=1e-5, bandwidth_Bps=1e9)
    cluster = Cluster(device=Device(name="x"), ranks_per_node=2, intra_node=link, inter_node=link)
    run = SimpleNamespace(
        config=SimpleNamespace(profile=profile),
        device=SimpleNamespace(type=device),
        mesh=SimpleNamespace(share=share),
    )
    assert with_host_costs(run, cluster) is cluster
