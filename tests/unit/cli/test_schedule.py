"""``shardwright schedule``: the picture."""

import json

import pytest

from cli.calling import call
from shardwright.schedule import KINDS


def test_the_picture_is_the_one_of_the_papers(capsys):
    code, out, err = call(capsys, "schedule", "1f1b", "-n", 2, "--microbatches", 3)
    assert (code, err) == (0, "")
    assert "rank 0 | F0 F1 .  .  B0=== F2 B1=== .  B2===\n" in out
    assert "rank 1 | .  F0 B0=== F1 B1=== F2 B2===\n" in out
    assert "step    12.0 s, of which each rank computes 9.00 s" in out
    assert "bubble  25.0% of the ranks' time (3.00 s a rank), simulated" in out
    assert "25.0% (3.00 s a rank), by the closed form\n" in out


@pytest.mark.parametrize("kind", KINDS)
def test_the_simulated_bubble_and_memory_are_those_of_the_closed_form(capsys, kind):
    _, out, _ = call(capsys, "schedule", kind, "-n", 3, "-m", 9, "--json")
    found = json.loads(out)
    assert found["bubble_s"] == pytest.approx(found["bubble_closed_form_s"])
    assert found["peak_activations"] == found["peak_activations_closed_form"]
    assert len(found["actions"]) == 3


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("1f1b", "--send", "0.5"), "free messages"),
        (("zb_h1", "--active", "2"), "no --active"),
        (("zb_v", "-n", "4", "-m", "2"), "at least 7 microbatches"),
        (("zb_v", "--forward", "2"), "F = I = W"),
        (("interleaved_1f1b", "-n", "4", "-m", "2"), "at least 4 microbatches"),
    ],
)
def test_where_simulation_and_formula_differ_the_reason_is_given(capsys, words, reason):
    _, out, _ = call(capsys, "schedule", *words)
    line = next(line for line in out.splitlines() if "closed form" in line)
    assert "which is for" in line
    assert reason in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("1f1c",), "there is no schedule '1f1c'"),
        (("1f1b", "--stages-per-rank", "2"), "ask for interleaved_1f1b"),
        (("zb_v", "--stages-per-rank", "3"), "zb_v runs exactly 2 stages"),
        (("1f1b", "--forward", "0"), "--forward is 0"),
        (("1f1b", "--backward", "nan"), "--backward is nan"),
        (("zb_h1", "--weight", "2"), "less than 2"),
        (("1f1b", "--send", "-1"), "--send is -1"),
        (("1f1b", "-n", "0"), "--num-ranks"),
    ],
)
def test_what_cannot_be_drawn_is_a_usage_error(capsys, words, message):
    code, out, err = call(capsys, "schedule", *words)
    assert (code, out) == (2, "")
    assert message in err


def test_a_dash_in_the_kind_is_an_underscore(capsys):
    assert call(capsys, "schedule", "zb-h1")[0] == 0
