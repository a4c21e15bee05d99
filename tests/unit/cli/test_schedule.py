"""``shardwright schedule``: the picture, the CSV, the check."""

import json

import pytest

from cli.calling import call
from shardwright.schedule import KINDS, build_schedule, place_stages, read_torch_csv


def test_the_picture_is_the_one_of_the_papers(capsys):
    code, out, err = call(capsys, "schedule", "show", "1f1b", "-n", 2, "--microbatches", 3)
    assert (code, err) == (0, "")
    assert "rank 0 | F0 F1 .  .  B0=== F2 B1=== .  B2===\n" in out
    assert "rank 1 | .  F0 B0=== F1 B1=== F2 B2===\n" in out
    assert "step    12.0 s, of which each rank computes 9.00 s" in out
    assert "bubble  25.0% of the ranks' time (3.00 s a rank), simulated" in out
    assert "25.0% (3.00 s a rank), by the closed form\n" in out


@pytest.mark.parametrize("kind", KINDS)
def test_the_simulated_bubble_and_memory_are_those_of_the_closed_form(capsys, kind):
    _, out, _ = call(capsys, "schedule", "show", kind, "-n", 3, "-m", 9, "--json")
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
    _, out, _ = call(capsys, "schedule", "show", *words)
    line = next(line for line in out.splitlines() if "closed form" in line)
    assert "which is for" in line
    assert reason in line


def test_durations_that_nothing_divides_are_rounded_to_columns(capsys):
    _, out, _ = call(capsys, "schedule", "show", "1f1b", "-n", 2, "-m", 2, "--forward", 1, "--backward", 1.37)
    assert "one column is 1.00 s, times are rounded to it" in out
    assert "rank 1 | .  F0 B0 F1 B1" in out


def test_halves_of_a_unit_are_drawn_exactly(capsys):
    _, out, _ = call(
        capsys, "schedule", "show", "gpipe", "-n", 1, "-m", 1, "--forward", 0.5, "--backward", 0.75
    )
    assert "one column is 250 ms\n" in out
    assert "rank 0 | F0=== B0======" in out


def test_a_picture_wider_than_the_terminal_is_cut(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    _, out, _ = call(capsys, "schedule", "show", "1f1b", "-n", 2, "-m", 64)
    rows = [line for line in out.splitlines() if line.startswith("rank 0 |")]
    assert len(rows[0]) == 40
    assert rows[0].endswith("…")
    assert "(cut at 40 of" in out


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
        (("1f1b", "--ranks", "0"), "--num-ranks"),
    ],
)
def test_what_cannot_be_drawn_is_a_usage_error(capsys, words, message):
    code, out, err = call(capsys, "schedule", "show", *words)
    assert (code, out) == (2, "")
    assert message in err


def test_a_dash_in_the_kind_is_an_underscore(capsys):
    assert call(capsys, "schedule", "show", "zb-h1")[0] == 0


@pytest.mark.parametrize("transfers", [[], ["--transfers"]])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_exported_is_read_back_and_right(capsys, tmp_path, kind, transfers):
    file = tmp_path / "schedule.csv"
    code, out, err = call(capsys, "schedule", "export", kind, file, "-n", 3, "-m", 6, *transfers)
    assert (code, out) == (0, "")
    assert f"wrote {file}: 3 ranks" in err
    found = read_torch_csv(file)
    assert found.has_transfers is bool(transfers)
    if not transfers:
        ranks = place_stages(kind, num_ranks=3)
        assert found.actions == build_schedule(kind, stage_ranks=ranks, num_microbatches=6).actions
    code, out, _ = call(capsys, "schedule", "check", file)
    assert code == 0
    assert f"{file} is right" in out


def test_an_export_to_stdout(capsys):
    code, out, err = call(capsys, "schedule", "export", "1f1b", "-", "-n", 2, "-m", 2)
    assert (code, out, err) == (0, "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", "")


def test_an_export_to_a_place_that_cannot_be_written(capsys, tmp_path):
    code, _, err = call(capsys, "schedule", "export", "1f1b", tmp_path / "gone" / "x.csv")
    assert code == 2
    assert "cannot be written: there is no folder" in err


WRONG = {
    "missing": ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1", "0B1 is missing. Add it to the row of rank 0"),
    "order": ("0F0,0F1,0B0,0B1\n1B0,1F0,1F1,1B1", "1B0"),
    "unsent": ("0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", "0SEND_F0"),
    "deadlock": (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1",
        "rank 0 stands at 0SEND_F1 and waits for 1RECV_F1 of rank 1",
    ),
}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=list(WRONG))
def test_a_wrong_schedule_is_told_what_is_wrong_and_where(capsys, tmp_path, text, message):
    file = tmp_path / "wrong.csv"
    file.write_text(text)
    code, out, err = call(capsys, "schedule", "check", file)
    assert (code, err) == (1, "")
    assert out.startswith(f"{file} is wrong: ")
    assert message in out
    code, out, _ = call(capsys, "schedule", "check", file, "--json")
    assert code == 1
    assert json.loads(out)["right"] is False
    assert message in json.loads(out)["problem"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("0F0,hello", "row 1 (rank 0), column 2: 'hello' is no action"), (None, "cannot be read")],
)
def test_what_is_no_schedule_is_a_usage_error(capsys, tmp_path, text, message):
    file = tmp_path / "none.csv"
    if text is not None:
        file.write_text(text)
    code, out, err = call(capsys, "schedule", "check", file)
    assert (code, out) == (2, "")
    assert message in err


def test_a_right_schedule_as_json(capsys, tmp_path):
    file = tmp_path / "right.csv"
    file.write_text("0F0,0B0\n1F0,1B0\n")
    _, out, _ = call(capsys, "schedule", "check", file, "--json")
    found = json.loads(out)
    assert (found["right"], found["ranks"], found["stages"], found["transfers"]) == (True, 2, 2, False)
