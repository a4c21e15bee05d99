"""Parameters that replicas share: what a rank needs, and when gradients are reduced."""

from typing import Any

import pytest
from graphs import chain_graph, profile_of

from planner.machines import machines
from shardwright.config import Config
from shardwright.errors import InfeasiblePlanError
from shardwright.mesh import Mesh
from shardwright.plan import Plan
from shardwright.planner import build_chain, make_plan
from shardwright.planner.drafts import Sharing
from shardwright.planner.layout import Layout

BLOCKS, MICROBATCHES, BLOCK_BYTES = 4, 4, 400


def graph_and_profile() -> Any:
    times = {"embed": (0.1, 0.2), "block": (0.2, 0.4), "head": (0.2, 0.4)}
    return chain_graph(BLOCKS), profile_of(times, saved_bytes=100, input_bytes=10)


def plan(**config: Any) -> Plan:
    settings = {"sharded_data_parallel_degree": 4, "sdp_param_persistence_threshold": 1, **config}
    mesh = Mesh.of(world_size=8, pipeline=2, data=4, shard=4)
    return make_plan(
        {MICROBATCHES: graph_and_profile()}, cluster=machines(), config=Config.parse(settings), mesh=mesh
    )


def peak(found: Plan) -> int:
    assert found.prediction is not None
    return max(memory.peak_bytes for memory in found.prediction.memory)


def test_gradients_are_reduced_in_every_microbatch_where_memory_requires_it() -> None:
    roomy = plan(pipeline="1f1b", activation_checkpointing="none")
    assert not roomy.schedule.reduce_every_microbatch
    limit = peak(roomy) - 1
    tight = plan(pipeline="1f1b", activation_checkpointing="none", memory_limit=limit)
    assert tight.schedule.reduce_every_microbatch
    assert peak(tight) <= limit
    assert any("reduced in every microbatch" in reason for reason in tight.why)
    with pytest.raises(InfeasiblePlanError):
        plan(pipeline="1f1b", activation_checkpointing="none", memory_limit=peak(tight) - 1)


@pytest.mark.parametrize(("most", "share"), [(10**9, 1.0), (150, 150 / 600), (1, 1 / 600)])
def test_what_is_gathered_from_other_hosts_has_a_limit(most: int, share: float) -> None:
    config = Config.parse(
        {
            "sharded_data_parallel_degree": 4,
            "sdp_param_persistence_threshold": 1,
            "sdp_max_live_parameters": most,
        }
    )
    mesh = Mesh.of(world_size=4, data=4, shard=4)
    chain = build_chain(*graph_and_profile())
    found = []
    for ranks_per_node in (4, 2):
        (way,) = Sharing.ways(config, mesh, machines(ranks_per_node=ranks_per_node), num_microbatches=1)
        shared = way.applied(chain)
        calls = shared.num_calls
        (state,) = Layout(chain=shared, cuts=(0, calls), ranks=(0,), recompute=[False] * calls).state_bytes()  # type: ignore[arg-type]
        found.append(state.parameters)
    whole = sum(use.num_bytes for use in chain.parameters)
    # Two ranks of a host keep half of what is gathered each.
    assert found[1] - found[0] == pytest.approx(whole / 2 * share, abs=2)


def test_rows_that_come_and_go_are_gathered_for_every_forward_and_backward() -> None:
    steps = []
    for most in (10**9, 1):
        found = make_plan(
            {MICROBATCHES: graph_and_profile()},
            cluster=machines(ranks_per_node=2, inter=(0, 1e4)),
            config=Config.parse(
                {
                    "sharded_data_parallel_degree": 4,
                    "sdp_param_persistence_threshold": 1,
                    "sdp_max_live_parameters": most,
                }
            ),
            mesh=Mesh.of(world_size=4, data=4, shard=4),
        )
        assert found.prediction is not None
        steps.append(found.prediction.step_s)
    whole_bytes = (BLOCKS + 2) * BLOCK_BYTES
    once_s = 3 / 4 * whole_bytes / 1e4
    # Where all come at once, some of them do so while the first forward computes.
    assert (2 * MICROBATCHES - 1) * once_s <= steps[1] - steps[0] < 2 * MICROBATCHES * once_s
