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
    assert "bubble  25.0% of the ranks' time (3.00 s a rank)\n" in out


@pytest.mark.parametrize("kind", KINDS)
def test_all_numbers_are_there_for_programs(capsys, kind):
    _, out, _ = call(capsys, "schedule", kind, "-n", 3, "-m", 9, "--json")
    found = json.loads(out)
    assert found["bubble_s"] > 0
    assert len(found["peak_activations"]) == 3
    assert len(found["actions"]) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("1f1c",), "there is no schedule '1f1c'"),
        (("1f1b", "--stages-per-rank", "2"), "ask for interleaved_1f1b"),
        (("zb_v", "--stages-per-rank", "3"), "zb_v runs exactly 2 stages"),
        (("1f1b", "--send", "1"), "Those of a model's own: shardwright explain PLAN"),
        (("1f1b", "-n", "0"), "--num-ranks"),
    ],
)
def test_what_cannot_be_drawn_is_a_usage_error(capsys, words, message):
    code, out, err = call(capsys, "schedule", *words)
    assert (code, out) == (2, "")
    assert message in err


def test_a_dash_in_the_kind_is_an_underscore(capsys):
    assert call(capsys, "schedule", "zb-h1")[0] == 0
