"""From a graph to a chain of calls."""

import pytest
from graphs import GraphBuilder, chain_graph, profile_of

from shardwright.errors import PlanError
from shardwright.planner.chain import Chain, Flow
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


def test_costs_follow_the_calls() -> None:
    chain = build_chain(chain_graph(2), PROFILE)
    assert chain.labels == ("embed", "h.0", "h.1", "head")
    assert chain.column("forward_s").tolist() == [0.5, 1.0, 1.0, 0.5]
    assert chain.column("backward_s").tolist() == [1.0, 2.0, 2.0, 1.0]
    assert chain.column("weight_s").tolist() == chain.column("input_s").tolist() == [0.5, 1.0, 1.0, 0.5]
    assert chain.column("kept_bytes").tolist() == [40.0] * 4
    assert chain.starts == (0, 1, 2, 3, 4)
    assert chain.provenance == "measured"


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


def test_parameters_of_units_and_glue() -> None:
    builder = GraphBuilder()
    table = builder.parameter("wte", 400)
    frozen = builder.parameter("frozen", 80, requires_grad=False)
    stats = builder.parameter("stats", 8, is_buffer=True)
    a = builder.unit("a", parameters=[table, stats])
    b = builder.unit("b", [a], parameters=[frozen])
    logits = builder.op("linear", [b], parameters=[table])
    chain = build_chain(builder.graph(loss=builder.op("loss", [logits])), PROFILE)
    uses = {use.name: (use.num_bytes, use.trained, use.calls) for use in chain.parameters}
    assert uses == {"wte": (400, True, (0, 1)), "frozen": (80, False, (1,)), "stats": (8, False, (0,))}


def test_ties_largest_first() -> None:
    builder = GraphBuilder()
    small, large = builder.parameter("small", 4), builder.parameter("large", 400)
    a = builder.unit("a", parameters=[small, large])
    b = builder.unit("b", [a], parameters=[small])
    c = builder.unit("c", [b], parameters=[large])
    chain = build_chain(builder.graph(loss=c), PROFILE)
    assert [[use.name for use in group] for group in chain.ties()] == [["large"], ["small"]]
    assert chain.contract([(0, 1)]).ties() == (chain.ties()[0],)
    assert chain.contract([(0, 2)]).ties() == ()


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


def test_contraction_of_overlapping_spans() -> None:
    chain = build_chain(chain_graph(6), PROFILE)
    assert chain.contract([(1, 3), (3, 5)]).starts == (0, 1, 6, 7, 8)
    assert chain.contract([(1, 3)]).contract([(2, 4)]).starts == (0, 1, 5, 6, 7, 8)


def test_a_profile_that_lacks_a_class() -> None:
    with pytest.raises(PlanError, match=r"has 0 cost classes but lacks 3 .* that of unit h.0. Profile"):
        build_chain(chain_graph(1), Profile(costs={}))
