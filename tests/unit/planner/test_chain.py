"""From a graph to a chain of calls; cuts on the boundaries of blocks.

Which calls must share a stage, for graphs built by hand.
"""

from dataclasses import replace

import pytest
from graphs import GraphBuilder, chain_graph, profile_of
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import PlanError
from shardwright.model_graph import ModelGraph, Together
from shardwright.planner.chain import Bond, Chain, Flow
from shardwright.planner.cuts import nesting_of, on_boundaries
from shardwright.planner.model_chain import build_chain
from shardwright.profile import Profile

PROFILE = profile_of()


def residual_graph(*, output_bytes: int = 40) -> GraphBuilder:
    """``a``, then ``b`` with a residual around it, then ``c``."""
    builder = GraphBuilder()
    a = builder.unit("a", output_bytes=output_bytes)
    b = builder.unit("b", [a], output_bytes=output_bytes)
    total = builder.op("add", [a, b], output_bytes=output_bytes, saved_bytes=8)
    c = builder.unit("c", [total], output_bytes=output_bytes)
    builder.op("mse_loss", [c], output_bytes=4)
    return builder


def test_glue_belongs_to_its_latest_input() -> None:
    builder = residual_graph()
    chain = build_chain(builder.graph(loss=4), PROFILE)
    # a is read by b and by the addition, whose home is b too: one flow, one target.
    assert chain.flows == (
        Flow(source=0, targets=(1,), num_bytes=40, gradient_bytes=40, gradient_targets=(1,)),
        Flow(source=1, targets=(2,), num_bytes=40, gradient_bytes=40, gradient_targets=(2,)),
    )
    assert chain.column("glue_bytes").tolist() == [0.0, 8.0, 0.0]


def test_glue_adds_its_time_and_is_never_recomputed() -> None:
    builder = GraphBuilder()
    a = builder.unit("a", output_bytes=40)
    logits = builder.op("linear", [a], output_bytes=800, cost_class="linear")
    chain = build_chain(
        builder.graph(loss=builder.op("loss", [logits], output_bytes=4)),
        profile_of({"block": (1.0, 2.0), "linear": (0.25, 0.5)}),
    )
    assert (chain.column("forward_s")[0], chain.column("backward_s")[0], chain.column("weight_s")[0]) == (
        1.25,
        2.5,
        1.0,
    )
    assert chain.column("input_s")[0] == 1.5
    assert chain.column("recompute_s")[0] == 1.0
    # The gradients of the logits and of their input are there at once.
    assert chain.column("work_bytes")[0] == 840


def test_no_gradient_without_requires_grad_or_loss() -> None:
    builder = GraphBuilder()
    a = builder.unit("a", requires_grad=False)
    b = builder.unit("b", [a])
    graph = builder.graph(loss=builder.op("loss", [b]))
    assert build_chain(graph, PROFILE).flows[0].gradient_bytes == 0
    assert build_chain(builder.graph(), PROFILE).flows[0].gradient_targets == ()


def test_what_rests_on_parameters_alone_lives_with_its_first_reader() -> None:
    builder = GraphBuilder()
    table = builder.parameter("positions", 400)
    positions = builder.op("slice", parameters=[table], saved_bytes=4)
    a = builder.unit("a")
    b = builder.unit("b", [a, positions])
    c = builder.unit("c", [b, positions])
    chain = build_chain(builder.graph(loss=builder.op("loss", [c])), PROFILE)
    assert [(flow.source, flow.targets) for flow in chain.flows] == [(1, (2,)), (0, (1,)), (1, (2,))]
    assert chain.column("glue_bytes").tolist() == [0.0, 4.0, 0.0]
    assert [(use.name, use.calls) for use in chain.parameters] == [("positions", (1,))]


def repeated(*, mutates_buffers: bool) -> Chain:
    builder = GraphBuilder()
    value = builder.unit("first")
    for index in range(3):
        value = builder.unit("shared", [value], mutates_buffers=mutates_buffers)
        value = builder.unit(f"after{index}", [value])
    return build_chain(builder.graph(loss=value), PROFILE)


def test_calls_of_a_unit_that_updates_buffers_stay_together() -> None:
    chain = repeated(mutates_buffers=True)
    assert chain.labels[1:6] == ("shared", "after0", "shared#1", "after1", "shared#2")
    assert chain.starts == (0, 1, 6, 7)
    assert chain.num_atoms == 3
    assert chain.atom_of_call.tolist() == [0, 1, 1, 1, 1, 1, 2]
    assert chain.uncontracted().num_atoms == 7


def test_a_profile_that_lacks_a_class() -> None:
    with pytest.raises(PlanError, match=r"has 0 cost classes but lacks 3 .* that of unit h.0. Profile"):
        build_chain(chain_graph(1), Profile(costs={}))


LABELS = (
    "embed",
    *(f"layers.{block}.{part}" for block in range(3) for part in ("attention", "mlp.0", "mlp.1")),
    "head",
)


def test_a_cut_counts_the_blocks_that_it_runs_through():
    assert [nesting_of(LABELS, cut) for cut in range(1, len(LABELS))] == [0, 1, 1, 0, 1, 1, 0, 1, 1, 0]
    assert nesting_of(("stages.0.blocks.1.norm", "stages.0.blocks.1.mlp"), 1) == 2
    assert nesting_of(("stages.0.blocks.1", "stages.0.blocks.2"), 1) == 1
    assert nesting_of(("layers.0.norm", "layers.0.norm#1"), 1) == 1


@pytest.mark.parametrize(
    ("cuts", "moved"),
    [
        ((0, 5, 11), (0, 4, 11)),
        ((0, 6, 11), (0, 7, 11)),
        ((0, 4, 11), None),
        ((0, 2, 3, 11), (0, 1, 4, 11)),
        ((0, 5, 6, 11), (0, 4, 7, 11)),
    ],
)
def test_cuts_move_to_the_nearest_boundary(cuts, moved):
    assert on_boundaries(cuts, LABELS, [1.0] * 11, range(12)) == moved


def test_a_boundary_at_which_nothing_may_be_cut_is_none():
    allowed = [position for position in range(12) if position != 4]
    assert on_boundaries((0, 5, 11), LABELS, [1.0] * 11, allowed) == (0, 7, 11)


@given(
    st.sets(st.integers(1, 10), min_size=1, max_size=6), st.lists(st.floats(0, 9), min_size=11, max_size=11)
)
def test_moved_cuts_still_leave_every_stage_something(inner, seconds):
    cuts = (0, *sorted(inner), 11)
    moved = on_boundaries(cuts, LABELS, seconds, range(12))
    if moved is not None:
        assert len(moved) == len(cuts)
        assert list(moved) == sorted(set(moved))
        before, after = (sum(nesting_of(LABELS, cut) for cut in each[1:-1]) for each in (cuts, moved))
        assert after <= before


def group(*nodes: int, one_rank: bool = False) -> Together:
    return Together(nodes, what="a region", line="model.py:3", why="why", remedy="do", one_rank=one_rank)


def blocks(number: int, *, op_after: int | None = None) -> ModelGraph:
    """A chain of units; after one of them comes an operation, which the next unit reads."""
    builder = GraphBuilder()
    value = builder.unit("h.0")
    for index in range(1, number):
        if index - 1 == op_after:
            value = builder.op("mul", [value])
        value = builder.unit(f"h.{index}", [value])
    return builder.graph(loss=value)


def chain_of(graph: ModelGraph, *groups: Together) -> Chain:
    return build_chain(replace(graph, together=groups), PROFILE)


def test_units_of_a_group_and_all_between_share_a_stage() -> None:
    chain = chain_of(blocks(6), group(1, 3))
    assert chain.starts == (0, 1, 4, 5, 6)
    always, one_rank = chain.bonds
    assert always == Bond(1, 3, "a region at model.py:3", "do")
    assert one_rank == replace(always, one_rank=True)


def test_an_operation_moves_to_its_group_and_binds_the_unit_that_reads_it() -> None:
    # Nodes: h.0, h.1, mul (at home with h.1), h.2, h.3, h.4.
    assert chain_of(blocks(5, op_after=1), group(2, 4)).starts == (0, 1, 2, 4, 5)


def test_an_operation_that_only_later_units_read_binds_nobody() -> None:
    builder = GraphBuilder()
    first = builder.unit("h.0")
    moved = builder.op("mean", [first])
    middle = builder.unit("h.1", [first])
    last = builder.unit("h.2", [middle])
    end = builder.op("add", [last, moved])
    chain = chain_of(builder.graph(loss=end), group(1, 3))
    assert chain.num_atoms == 3
    # The rank of h.2 must not have gone on to it when h.1 comes, so h.1 is not on another stage of it.
    assert chain.bound(stages_per_rank=2).starts == (0, 1, 3)


def test_what_moves_takes_along_what_rests_on_it_also_into_other_groups() -> None:
    builder = GraphBuilder()
    value = builder.unit("h.0")
    first = builder.op("mul", [value])  # node 1, moves to h.2
    second = builder.op("add", [first])  # node 2, so does this one, and with it the other group
    for index in range(1, 4):
        value = builder.unit(f"h.{index}", [value])  # nodes 3 to 5
    end = builder.op("sum", [value, second])
    chain = chain_of(builder.graph(loss=end), group(1, 4), group(2, 3))
    assert chain.starts == (0, 1, 3, 4)  # h.1 is in the group of what has moved to h.2


@pytest.mark.parametrize(("stages_per_rank", "starts"), [(1, (0, 1, 2, 3, 4)), (2, (0, 3, 4))])
def test_a_rank_with_several_stages_computes_an_operation_where_it_has_got_to(
    stages_per_rank: int, starts: tuple[int, ...]
) -> None:
    builder = GraphBuilder()
    start = value = builder.unit("h.0")
    for index in range(1, 3):
        value = builder.unit(f"h.{index}", [value])
    late = builder.op("mul", [start])  # node 3: its home is h.0, or where the rank of h.0 has got to
    value = builder.unit("h.3", [value, late])
    chain = chain_of(builder.graph(loss=value), group(0, 3))
    assert chain.bound(stages_per_rank=stages_per_rank).starts == starts
