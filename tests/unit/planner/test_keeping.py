"""The choice between keeping, recomputing and offloading, for ranks that do not fit otherwise."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from graphs import chain_graph
from hypothesis import given
from hypothesis import strategies as st

from planner.test_layout import lay_out, recompute_profile
from shardwright.cluster import Link
from shardwright.costs.calibration import OFFLOADED_CALL_S
from shardwright.planner.keeping import choose_keeping
from shardwright.planner.layout import Layout
from shardwright.planner.objective import Demands
from shardwright.planner.rank_memory import rank_memory

Way = tuple[bool, bool]  # recomputed, offloaded

SLOW, FAST = (Link(latency_s=0.0, bandwidth_Bps=bandwidth) for bandwidth in (100.0, 1e6))
BUSY = Link(latency_s=0.0, bandwidth_Bps=1e5, occupancy=1.0)
OFFLOADS = Demands(recompute="none", offload="auto")
BOTH = Demands(offload="auto")
FLIGHTS = [4]


def blocks(*rows: tuple[float, int]) -> Layout:
    """Blocks of one stage, as (forward seconds, saved bytes); inputs take 10 bytes."""
    classes = [f"c{i}" for i in range(len(rows))]
    return lay_out(
        chain_graph(len(rows), classes=classes), (0, len(rows) + 2), (0,), recompute_profile([*rows])
    )


def peak(layout: Layout, flights: list[int], rank: int = 0) -> int:
    """Of a rank, by an upper bound, with the units that are on their way."""
    activations, windows = [0] * layout.num_ranks, [0] * layout.num_ranks
    for cost, flight, owner in zip(layout.stage_costs(), flights, layout.ranks, strict=True):
        activations[owner] += flight * cost.saved_bytes
        windows[owner] = max(windows[owner], cost.window_bytes + cost.tail_bytes * (flight > 1))
    both = [sum(each) for each in zip(activations, windows, strict=True)]
    return rank_memory(layout, activation_bytes=both)[rank].peak_bytes


def choose(layout: Layout, missing: int, demands: Demands, host: Link | None = None) -> list[Way]:
    """What is chosen where so many bytes are missing."""
    limit = peak(layout, FLIGHTS) - missing
    chosen = choose_keeping(layout, replace(demands, limit_bytes=limit), in_flight=FLIGHTS, host=host)
    assert peak(chosen, FLIGHTS) <= limit
    away = np.zeros_like(chosen.recompute) if chosen.offload is None else chosen.offload
    return list(zip(chosen.recompute.tolist(), away.tolist(), strict=True))


MIDDLE = [(1.0, 1000)] * 6


def test_copies_that_take_a_core_hide_nothing() -> None:
    """A byte takes 20 us of a core, there and back, and a unit of 1000 bytes 10 ms to repeat."""
    cheap = blocks(*[(1e-2, 1000)] * 6)
    assert not any(away for _, away in choose(cheap, 4000, BOTH, BUSY))
    assert any(away for _, away in choose(cheap, 4000, BOTH, FAST))


def test_dear_units_leave_and_cheap_ones_are_recomputed() -> None:
    """The tier takes what hides behind computing, which is not enough: cheap units do the rest."""
    rows = [(9.0, 1000), (0.01, 1000), (9.0, 1000), (0.01, 1000), (9.0, 1000), (0.01, 1000)]
    layout = blocks(*rows)
    ways = choose(layout, 12_000, BOTH, Link(latency_s=0.0, bandwidth_Bps=150.0))
    for (again, away), (forward_s, _) in zip(ways[1:-1], rows, strict=True):
        assert not (again and forward_s > 1)
        assert again or not away or forward_s > 1  # inputs of what is recomputed may leave, too
    assert any(again for again, _ in ways)
    assert any(away for _, away in ways)


def test_what_is_not_allowed_is_not_chosen() -> None:
    layout = blocks(*MIDDLE)
    assert not any(away for _, away in choose(layout, 4000, Demands()))
    assert not any(again for again, _ in choose(layout, 4000, OFFLOADS))
    nothing = Demands(recompute="none", limit_bytes=1)
    assert choose_keeping(layout, nothing, in_flight=FLIGHTS) is layout


@given(
    rows=st.lists(st.tuples(st.floats(0.1, 5), st.integers(10, 2000)), min_size=1, max_size=3),
    missing=st.floats(0, 1),
    bandwidth=st.sampled_from([50.0, 500.0, 1e6]),
    may=st.sampled_from([(True, True), (False, True)]),
)
def test_a_choice_fits_where_one_does(
    rows: list[tuple[float, int]], missing: float, bandwidth: float, may: Way
) -> None:
    layout = blocks(*rows)
    calls = range(layout.chain.num_calls)
    ways = itertools.product(*[[(False, False), (may[0], False), (False, True)] for _ in calls])
    peaks = {
        peak(
            layout.with_recompute([c for c in calls if way[c][0]]).with_offload(
                [c for c in calls if way[c][1]]
            ),
            FLIGHTS,
        )
        for way in ways
    }
    limit = round(max(peaks) - missing * (max(peaks) - min(peaks)))
    demands = Demands(recompute="auto" if may[0] else "none", offload="auto", limit_bytes=limit)
    host = Link(latency_s=0.0, bandwidth_Bps=bandwidth)
    chosen = choose_keeping(layout, demands, in_flight=FLIGHTS, host=host)
    assert peak(chosen, FLIGHTS) <= limit


def test_a_rank_hands_over_what_leaves() -> None:
    """Bug: on one rank a step was predicted to take as long with offload as without it."""
    layout = blocks(*MIDDLE)
    (kept,) = layout.stage_costs()
    (away,) = layout.with_offload(range(1, 7)).stage_costs()
    assert away.forward_s - kept.forward_s == pytest.approx(6 * OFFLOADED_CALL_S)
    assert away.backward_s - kept.backward_s == pytest.approx(6 * OFFLOADED_CALL_S)
    # Of a recomputed unit hardly more than an input leaves.
    again = layout.with_recompute(range(1, 7))
    assert again.with_offload(range(1, 7)).stage_costs()[0].forward_s == again.stage_costs()[0].forward_s


@pytest.mark.parametrize("horizon", [1, 2])
def test_stages_have_a_few_units_at_once(horizon: int) -> None:

    layout = replace(blocks(*MIDDLE), horizon=horizon).with_offload(range(1, 7))
    (cost,) = layout.stage_costs()
    leaving = layout.leaving_bytes()
    assert cost.offload_bytes == leaving.sum()
    assert cost.window_bytes == (horizon + 1) * 1000
    assert cost.tail_bytes == horizon * 1000
