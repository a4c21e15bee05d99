"""A host that computes more slowly than others gets less of the model."""

import json
from pathlib import Path

import pytest

from shardwright.testing.cluster import Cluster, missing_for_networks

_MISSING = missing_for_networks()
SCRIPT = str(Path(__file__).with_name("planning_on_a_slow_host.py"))


@pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))
def test_a_slow_host_gets_less_of_the_model(tmp_path):
    out = tmp_path / "found.json"
    with Cluster(hosts=2, ranks_per_host=1, own_cores=True) as machines:
        machines.torchrun([SCRIPT, str(out)], timeout_s=120)
    found = json.loads(out.read_text())
    fast, slow = found["slowness"]
    assert slow > 1.2 * fast
    assert found["units"][0] > found["units"][1]
    assert any("Pipeline rank 1 takes" in why for why in found["why"])
