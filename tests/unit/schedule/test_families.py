"""Each family: its classic rows as literals, its bubble and memory against the closed form."""

import importlib
import re

import pytest

from shardwright.errors import ScheduleError
from shardwright.schedule import (
    KINDS,
    Kind,
    StageCost,
    build_schedule,
    place_stages,
    simulate,
    unit_costs,
)

from .cases import count_kept, text_of
from .formulas import bubble_seconds, peak_activations


def build(kind, stage_ranks, m, **options):
    return build_schedule(kind, stage_ranks=stage_ranks, num_microbatches=m, **options)


def home(kind, p, m, v=None, **options):
    return build(kind, place_stages(kind, num_ranks=p, stages_per_rank=v), m, **options)


def test_gpipe_goes_in_waves_when_few_microbatches_may_be_active():
    assert text_of(home("gpipe", 2, 5, active_microbatches=2)) == [
        "0F0 0F1 0B0 0B1 0F2 0F3 0B2 0B3 0F4 0B4",
        "1F0 1F1 1B0 1B1 1F2 1F3 1B2 1B3 1F4 1B4",
    ]


def test_1f1b_with_few_active_microbatches():
    assert text_of(home("1f1b", 3, 3, active_microbatches=2)) == [
        "0F0 0F1 0B0 0F2 0B1 0B2",
        "1F0 1F1 1B0 1F2 1B1 1B2",
        "2F0 2B0 2F1 2B1 2F2 2B2",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_takes_microbatch_by_microbatch(kind):
    """Bug: a plan with GPipe on one rank was predicted to keep all of them, and the run kept one."""
    assert text_of(build(kind, (0,), 3)) == ["0F0 0B0 0F1 0B1 0F2 0B2"]
    assert text_of(build(kind, (0, 0), 2)) == ["0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"]


@pytest.mark.parametrize(
    ("module", "kind", "stage_ranks", "m", "forward_only"),
    [
        ("families", "gpipe", (0, 1), 4, False),
        ("families", "1f1b", (0, 1, 2), 4, False),
        ("families", "interleaved_1f1b", (0, 1, 0, 1), 4, False),
        ("families", "zb_h1", (0, 1, 2), 5, False),
        ("families", "zb_v", (0, 1, 1, 0), 4, False),
        ("list_scheduler", "1f1b", (0, 1, 0), 3, True),
        ("schedule", "1f1b", (0, 1), 3, False),
    ],
)
def test_the_picture_above_a_family_is_what_it_builds(module, kind, stage_ranks, m, forward_only):
    document = importlib.import_module(f"shardwright.schedule.{module}").__doc__
    pictured = re.findall(r"^ *(rank \d .*)$", document, re.MULTILINE)
    drawn = build(kind, stage_ranks, m, forward_only=forward_only).draw().splitlines()

    def shows(picture, line):
        return line.startswith(picture.removesuffix("...").rstrip()) if "..." in picture else picture == line

    runs = (pictured[first : first + len(drawn)] for first in range(len(pictured) - len(drawn) + 1))
    assert any(all(map(shows, run, drawn)) for run in runs)


def bubble(schedule, costs):
    """Idle seconds of a rank in a step; all ranks have the same work."""
    simulation = simulate(schedule, costs)
    return simulation.step_s - max(simulation.busy_s)


@pytest.mark.parametrize(
    ("kind", "stages"),
    [("gpipe", 1), ("1f1b", 1), *(("interleaved_1f1b", v) for v in (1, 2, 3, 4)), ("zb_h1", 1), ("zb_v", 2)],
)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_bubble_of_equal_stages_is_the_closed_form(kind, stages, p):
    """The stages of a rank take 6 s forward and 12 s backward together, however many they are."""
    costs = [StageCost(6 / stages, 12 / stages, 6 / stages)] * (p * stages)
    expected = bubble_seconds(
        kind, num_ranks=p, forward_s=6, backward_s=12, weight_s=6, stages_per_rank=stages
    )
    for m in (2 * p - 1, 2 * p, 2 * p + 1, 4 * p):
        schedule = home(kind, p, m, v=stages)
        assert bubble(schedule, costs) == pytest.approx(expected)


@pytest.mark.parametrize(("forward_s", "input_s", "weight_s"), [(1, 1, 1), (2, 3, 1), (3, 2, 2), (1, 1, 2)])
@pytest.mark.parametrize("p", [2, 4, 7])
def test_zb_h1_bubble_for_unequal_parts(p, forward_s, input_s, weight_s):
    """(p - 1)(tF + tI - tW); a W longer than I is worth no more than one as long."""
    costs = [StageCost(forward_s, input_s + weight_s, weight_s)] * p
    expected = bubble_seconds(
        "zb_h1", num_ranks=p, forward_s=forward_s, backward_s=input_s + weight_s, weight_s=weight_s
    )
    assert expected == (p - 1) * (forward_s + input_s - min(weight_s, input_s))
    for m in (p, p + 1, 3 * p):
        assert bubble(home("zb_h1", p, m, costs=costs), costs) == pytest.approx(expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_memory_of_the_classic_rows_is_the_closed_form(kind, p):
    for v in {"interleaved_1f1b": (1, 2, 4), "zb_v": (2,)}.get(kind, (1,)):
        for m in (1, p, 2 * p + 1, 4 * p):
            schedule = home(kind, p, m, v=v)
            for rank, row in enumerate(schedule.actions):
                kept = count_kept(row, until=(Kind.BACKWARD, Kind.BACKWARD_WEIGHT))
                bound = peak_activations(kind, num_ranks=p, rank=rank, num_microbatches=m, stages_per_rank=v)
                # ZB-H1 keeps p on every rank at most; ranks that can join I and W keep fewer.
                assert kept <= bound if kind in ("zb_h1", "zb_v") else kept == bound
            most = max(
                count_kept(row, until=(Kind.BACKWARD, Kind.BACKWARD_WEIGHT)) for row in schedule.actions
            )
            assert most == max(
                peak_activations(kind, num_ranks=p, rank=rank, num_microbatches=m, stages_per_rank=v)
                for rank in range(p)
            )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "simple"}, "there is no schedule 'simple'. Choose one of gpipe"),
        ({"stage_ranks": ()}, "stage_ranks is empty"),
        ({"stage_ranks": (0, 2)}, "rank 1 has no stage"),
        ({"stage_ranks": (0, -1)}, "rank -1 is negative"),
        ({"num_microbatches": 0}, "0 microbatches. Give 1 or more"),
        ({"active_microbatches": 0}, "active_microbatches 0: nothing could start. The minimum is 1"),
        ({"costs": unit_costs(3)}, "3 costs were given for 2 stages"),
    ],
)
def test_what_cannot_be_built_is_refused(options, words):
    arguments = {"kind": "1f1b", "stage_ranks": (0, 1), "num_microbatches": 2} | options
    with pytest.raises(ScheduleError, match=words):
        build_schedule(arguments.pop("kind"), **arguments)
