"""Stages of a layout: costs, edges, parameters; memory and recomputation."""

import itertools

import numpy as np
from graphs import GraphBuilder, chain_graph, profile_of
from hypothesis import given
from hypothesis import strategies as st

from shardwright.model_graph import ModelGraph
from shardwright.planner.keeping import choose_keeping
from shardwright.planner.layout import Layout
from shardwright.planner.model_chain import build_chain
from shardwright.planner.objective import Demands
from shardwright.planner.rank_memory import (
    Above,
    messages,
    rank_memory,
    scheduled_above,
    work_bytes,
)
from shardwright.profile import Profile, UnitCost
from shardwright.schedule import Action, Edge, Kind, Schedule


def lay_out(
    graph: ModelGraph, cuts: tuple[int, ...], ranks: tuple[int, ...], profile: Profile | None = None
) -> Layout:
    chain = build_chain(graph, profile or profile_of())
    return Layout(chain=chain, cuts=cuts, ranks=ranks, recompute=np.zeros(chain.num_calls, dtype=bool))


def test_a_value_that_several_calls_keep_counts_once_a_stage() -> None:
    """An activation's result and the next layer's input are one tensor; it was counted twice."""
    builder = GraphBuilder()
    a = builder.unit("a", output_bytes=40)
    b = builder.unit("b", [a], output_bytes=40, saved_values=[a])
    c = builder.unit("c", [b], output_bytes=40, saved_values=[b, a])
    d = builder.unit("d", [b, c], saved_values=[b])
    graph = builder.graph(loss=d)
    profile = Profile(
        costs={"block": UnitCost(forward_s=1.0, backward_s=2.0, saved_bytes=100, input_bytes=40)}
    )
    whole = lay_out(graph, (0, 4), (0,), profile)
    assert whole.stage_costs()[0].saved_bytes == 4 * 100 - 2 * 40
    # Kept to be sent back to (b, by both; a was counted on both sides of the cut), and by c and d.
    cut = lay_out(graph, (0, 2, 4), (0, 1), profile)
    assert [cost.saved_bytes for cost in cut.stage_costs()] == [2 * 100 + 40, 2 * 100 - 40]
    # Recomputed calls keep what they read, c and d both b.
    again = whole.with_recompute([0, 1, 2, 3])
    assert again.stage_costs()[0].saved_bytes == 4 * 40 - 40


def test_what_another_rank_has_sent_stays_though_nothing_keeps_it() -> None:
    """Bug: a decoder was predicted without the encoder's results that it concatenates: 9 % of a U-Net."""
    builder = GraphBuilder()
    skipped = builder.unit("a", output_bytes=40)
    deep = builder.unit("b", [skipped], output_bytes=8)
    up = builder.unit("c", [deep], output_bytes=8, saved_values=[deep])
    both = builder.op("cat", [up, skipped], output_bytes=48)
    graph = builder.graph(loss=builder.unit("d", [both], saved_values=[both]))
    profile = Profile(
        costs={"block": UnitCost(forward_s=1.0, backward_s=2.0, saved_bytes=100, input_bytes=48)}
    )
    # Kept to be sent back to: both. Received: the deep one, which c keeps anyway, and the other.
    for ranks, received in (((0, 1), 40), ((0, 0), 0)):
        layout = lay_out(graph, (0, 2, 4), ranks, profile)
        assert [cost.saved_bytes for cost in layout.stage_costs()] == [200 + 40 + 8, 200 + received]
    layout = lay_out(graph, (0, 2, 4), (0, 1), profile)
    kept = [cost.saved_bytes for cost in layout.stage_costs()]
    tight = choose_keeping(layout, Demands(limit_bytes=max(kept)), in_flight=(1, 1))
    assert tight.recompute.any()


def test_edges_skip_stages_and_count_each_value_once() -> None:
    builder = GraphBuilder()
    a = builder.unit("a", output_bytes=40)
    b = builder.unit("b", [a], output_bytes=8)
    c = builder.unit("c", [a, b], output_bytes=4, requires_grad=False)
    d = builder.unit("d", [a, c])
    layout = lay_out(builder.graph(loss=d), (0, 1, 2, 4), (0, 1, 0))
    assert layout.edges() == (
        # No gradient: what b makes goes into c alone, which has none.
        Edge(0, 1, num_bytes=40, gradient_bytes=0, has_gradient=False),
        Edge(0, 2, num_bytes=40, gradient_bytes=40),
        Edge(1, 2, num_bytes=8, gradient_bytes=0, has_gradient=False),
    )


def test_parameters_count_once_a_rank() -> None:
    layout = lay_out(chain_graph(2, tied=True), (0, 1, 3, 4), (0, 1, 0))
    assert layout.state_bytes() == [(400, 400, 400, 0), (800, 800, 800, 0)]
    assert layout.trained_bytes() == [(400, 0), (800, 0)]
    assert layout.stage_parameter_bytes() == [400, 800, 400]
    assert layout.replicated() == {}
    apart = lay_out(chain_graph(2, tied=True), (0, 1, 3, 4), (0, 1, 2))
    assert apart.replicated() == {"embed.weight": (0, 2)}


def test_memory_adds_up() -> None:
    layout = lay_out(chain_graph(2), (0, 2, 4), (0, 1), profile_of(work_bytes=64)).with_recompute([1])
    first, second = rank_memory(layout, activation_bytes=(500, 600), optimizer_factor=2.0)
    assert (first.parameters_bytes, first.gradients_bytes, first.optimizer_bytes) == (800, 800, 1600)
    # Recomputed without the 1000 bytes behind it; one gradient that came in (40) stays, one is on its way;
    # and two values that leave.
    assert (first.activations_bytes, first.work_bytes, first.peak_bytes) == (
        500,
        960 + 80 + 2 * 40 + 2 * 40,
        4900,
    )
    # A value that comes in, and two gradients that leave.
    assert (second.work_bytes, second.peak_bytes) == (80 + 40 + 2 * 40, 4000)


def test_a_rank_has_shared_memory_for_each_that_it_sends_to() -> None:
    """For as many messages at a time, and of the largest alone: values and gradients share it."""
    assert [found.leaving for found in messages(_lay_out_of(ranks=(0, 1, 2)))] == [80, 160, 80]
    assert [found.leaving for found in messages(_lay_out_of(ranks=(0, 1, 0)))] == [80, 80]


def _lay_out_of(*, ranks: tuple[int, ...]) -> Layout:
    return lay_out(chain_graph(4), (0, 2, 4, 6), ranks, profile_of())


def test_temporaries_count_when_they_are_there() -> None:
    """The weights' gradients keep much, but not while a unit is recomputed."""
    costs = {
        name: UnitCost(
            forward_s=1.0, backward_s=2.0, weight_s=1.0, saved_bytes=1000, input_bytes=10, weight_bytes=900
        )
        for name in ("embed", "block", "head")
    }
    layout = lay_out(chain_graph(2), (0, 4), (0,), Profile(costs=costs)).with_recompute([0, 1, 2, 3])
    costs_of_stages = layout.stage_costs()
    row = tuple(Action(kind, 0, 0) for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))
    schedule = Schedule(kind="by hand", stage_ranks=(0,), num_microbatches=1, actions=(row,))
    # Most is needed when the first call is computed again, behind what three calls leave for W; but then the
    # bytes that it will leave itself, 900, are not there yet, and its input is.
    (above,) = scheduled_above(schedule, layout, costs_of_stages)
    assert above == Above((3 * (900 - 10) + (1000 - 10) + 40) - 4 * (900 - 10), 0)
    assert above.num_bytes < max(work_bytes(layout))


def recompute_profile(rows: list[tuple[float, int]]) -> Profile:
    """Costs of blocks as (forward seconds, saved bytes); inputs take 10 bytes."""
    costs = {
        f"c{i}": UnitCost(forward_s=seconds, backward_s=1.0, saved_bytes=saved, input_bytes=10)
        for i, (seconds, saved) in enumerate(rows)
    }
    cheap = UnitCost(forward_s=0.1, backward_s=0.2)
    return Profile(costs={**costs, "embed": cheap, "head": cheap})


def peak(layout: Layout, flights: list[int], rank: int) -> int:
    activations = [0] * layout.num_ranks
    for cost, flight, owner in zip(layout.stage_costs(), flights, layout.ranks, strict=True):
        activations[owner] += flight * cost.saved_bytes
    return rank_memory(layout, activation_bytes=activations)[rank].peak_bytes


@given(
    rows=st.lists(st.tuples(st.floats(0.1, 5), st.integers(10, 2000)), min_size=2, max_size=6),
    flights=st.lists(st.integers(1, 4), min_size=2, max_size=2),
    limit=st.integers(5000, 30_000),
    cut=st.integers(1, 7),
)
def test_recomputation_is_enough_and_nothing_of_it_is_idle(
    rows: list[tuple[float, int]], flights: list[int], limit: int, cut: int
) -> None:
    classes = [f"c{i}" for i in range(len(rows))]
    num_calls = len(rows) + 2
    cuts = (0, min(cut, num_calls - 1), num_calls)
    layout = lay_out(chain_graph(len(rows), classes=classes), cuts, (0, 1), recompute_profile(rows))
    chosen = choose_keeping(layout, Demands(limit_bytes=limit), in_flight=flights)
    for rank in range(2):
        calls = list(layout.calls(rank))
        picked = [call for call in calls if chosen.recompute[call]]
        ways = itertools.chain.from_iterable(
            itertools.combinations(calls, size) for size in range(len(calls) + 1)
        )
        possible = any(peak(layout.with_recompute(way), flights, rank) <= limit for way in ways)
        if possible:
            assert peak(chosen, flights, rank) <= limit
            for call in picked:
                without = layout.with_recompute([c for c in picked if c != call])
                assert peak(without, flights, rank) > limit
