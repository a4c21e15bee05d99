"""``shardwright explain --what-if``."""

import json

import pytest
from planned import planned

from cli.calling import call
from shardwright.plan.prediction import LinkConditions

FREE = LinkConditions(latency_s=0.0, bandwidth_Bps=None)


@pytest.fixture
def plan(tmp_path):
    """Two ranks with 4 microbatches of 0.3 s each: 1.5 s of schedule, 4 ms around it, 50 ms of sums."""
    found = planned(action_overhead_s=0.0, intra_node=FREE, kind="1f1b")
    found.write(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def simulated(capsys, *words):
    code, out, err = call(capsys, "explain", *words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_nothing_changed(capsys, plan):
    found = simulated(capsys, plan, "--what-if", "latency=1")
    assert found["planned"] == found["changed"]
    assert found["planned"]["step_s"] == pytest.approx(1.5 + 0.054)
    assert simulated(capsys, plan.parent, "--what-if", "latency=1") == found


def test_a_slow_rank(capsys, plan):
    found = simulated(capsys, plan, "--what-if", "slow1=2")
    # Rank 1 works 4 times 0.6 s and waits for the first forward; rank 0 follows its last backward.
    assert found["changed"]["schedule_s"] == pytest.approx(4 * 0.6 + 0.3)
    assert found["changed"]["idle_s"] == pytest.approx([1.5, 0.3])
    assert found["planned"]["idle_s"] == pytest.approx([0.3, 0.3])


def test_as_text(capsys, plan):
    code, out, _ = call(capsys, "explain", plan, "--what-if", "slow1=2", "--what-if", "microbatches=8")
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert lines[2] == ["step", "1.55", "s", "2.60", "s", "+67.6%"]
    assert "in proportion to its size" in out
    assert lines[-2] == ["0", "1.20", "s", "1.35", "s", "300", "ms", "100", "B", "200", "B"]
    assert "the plan itself" not in out.lower()


def test_the_timeline_is_written(capsys, plan, tmp_path):
    file = tmp_path / "slow.json"
    code, _, err = call(capsys, "explain", plan, "--what-if", "slow1=2", "--trace", file)
    assert code == 0
    assert f"wrote {file}" in err
    events = json.loads(file.read_text())["traceEvents"]
    assert max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") == 2_700_000
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"simulated"}
    code, _, err = call(capsys, "explain", plan, "--trace", tmp_path / "nowhere" / "slow.json")
    assert code == 2
    assert "cannot be written" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--what-if", "slow=2"), "slow must end with the number of a pipeline rank: slow1=1.5"),
        (("--what-if", "slow1=a"), "slow1 is a, but it must be a number"),
        (("--what-if", "slowone=2"), "--what-if slowone=2: write NAME=VALUE"),
        (("--what-if", "slow5=2"), "rank 5 was to be slow, but the plan has the pipeline ranks 0 to 1"),
        (("--what-if", "bandwidth=0"), "the factor of bandwidth is 0"),
        (("--what-if", "schedule=2f2b"), "there is no schedule '2f2b'. Choose one of gpipe"),
        (("--what-if", "microbatches=0"), "microbatches"),
    ],
)
def test_what_makes_no_sense_is_refused(capsys, plan, words, message):
    code, out, err = call(capsys, "explain", plan, *words)
    assert (code, out) == (2, "")
    assert message in err
