"""Faults on purpose: their file, what is drawn, what came before."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwright.errors import ConfigError
from shardwright.testing import fault_points
from shardwright.testing.faults import Fault, Faults, RandomFaults, happen, missing_for_links


def read(folder: Path, text: str) -> Faults:
    path = folder / "faults.yaml"
    path.write_text(text)
    return Faults.read(path)


def test_a_file_says_kind_rank_step_and_phase(tmp_path: Path) -> None:
    found = read(tmp_path, "faults: [{kind: full-disk, rank: 1, phase: save, step: 3}]\nrandom: {seed: 7}")
    assert found.faults == (Fault(kind="full_disk", rank=1, phase="save", step=3),)
    assert found.random == RandomFaults(seed=7, every_s=60)
    assert read(tmp_path, "") == Faults()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("faults: [{kind: kill", "line 2"),
        ("faults: [{kind: kil, rank: 0}]", "faults.0.kind"),
        ("faults: [{kind: kill}]", "faults.0.rank"),
        ("faults: [{kind: slow, rank: 0}]", "slow needs seconds"),
        ("faults: [{kind: kill, rank: 0, seconds: 1}]", "kill takes no seconds"),
        ("faults: [{kind: kill, rank: 0, phase: end, step: 2}]", "leave step out"),
        ("faults: [{kind: full_disk, rank: 0}]", "full_disk is for phase save"),
        ("faults: [{kind: lone_collective, rank: 0, phase: backward}]", "phases start, update and end"),
        ("faults: [{kind: kill, rank: 0, stepp: 2}]", "stepp"),
        ("random: {kinds: []}", "random.kinds"),
        ("random: {kinds: [full_disk]}", "random.kinds.0"),
        ("random: {every_s: 0}", "random.every_s"),
    ],
)
def test_a_mistake_is_named_by_line_or_field(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)chaos file .*{said}"):
        read(tmp_path, text)


def test_a_run_without_such_a_rank_is_refused() -> None:
    faults = Faults(faults=(Fault(kind="kill", rank=5),))
    faults.check(6)
    with pytest.raises(ConfigError, match="rank 5, but the ranks are 0 to 3"):
        faults.check(4)


def test_the_link_of_the_machine_stays() -> None:
    assert missing_for_links()
    with pytest.raises(ConfigError, match="no link is taken down"):
        happen("link_down")


def test_random_faults_are_drawn_by_their_number_and_a_seed() -> None:
    drawn = RandomFaults(seed=3, every_s=10, seconds=1.5)
    faults = [drawn.drawn(number, 4) for number in range(200)]
    assert faults == [drawn.drawn(number, 4) for number in range(200)]
    assert {fault.rank for fault, _ in faults} == {0, 1, 2, 3}
    assert {fault.kind for fault, _ in faults} == set(drawn.kinds)
    assert all(5 <= after_s <= 15 for _, after_s in faults)
    assert {fault.seconds for fault, _ in faults if fault.kind == "pause"} == {1.5}
    assert RandomFaults(seed=4, every_s=10, seconds=1.5).drawn(0, 4) != faults[0]


def points(folder: Path, faults: Faults, rank: int = 0) -> fault_points.RankFaults:
    return fault_points.RankFaults(faults, rank, 2, folder / fault_points.NOTES)


def test_a_fault_happens_once_over_restarts_unless_it_comes_again(tmp_path: Path) -> None:
    once = Fault(kind="kill", rank=0, step=2, phase="update")
    again = Fault(kind="exit", rank=0, phase="start", again=True)
    other = Fault(kind="stop", rank=1, phase="start")
    faults = Faults(faults=(once, again, other))
    first = points(tmp_path, faults)
    assert list(first.due("update", 1)) == []
    assert list(first.due("forward", 3)) == []
    assert list(first.due("start", None)) == [again]
    assert list(first.due("update", 3)) == [once]
    assert list(first.due("update", 4)) == []
    second = points(tmp_path, faults)
    assert second.phases == {"start"}
    assert list(second.due("start", None)) == [again]
    notes = fault_points.happened(tmp_path / fault_points.NOTES)
    assert [(note["fault"], note["kind"], note["step"]) for note in notes] == [
        ("1", "exit", None),
        ("0", "kill", 3),
        ("1", "exit", None),
    ]


def test_a_slow_rank_is_slow_in_each_step(tmp_path: Path) -> None:
    slow = Fault(kind="slow", rank=0, step=2, seconds=0.1)
    rank = points(tmp_path, Faults(faults=(slow,)))
    assert [list(rank.due("forward", step)) for step in (1, 2, 3)] == [[], [slow], [slow]]
    assert len(fault_points.happened(tmp_path / fault_points.NOTES)) == 1


def test_random_faults_come_to_their_rank_and_go_on_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    drawn = RandomFaults(every_s=10, kinds=("lone_collective",), most=2)  # with updates alone
    faults = Faults(random=drawn)
    (first, after_s), (second, _) = drawn.drawn(0, 2), drawn.drawn(1, 2)
    victim, other = points(tmp_path, faults, first.rank), points(tmp_path, faults, 1 - first.rank)
    assert list(victim.due("update", 1)) == []
    now_s += after_s - 0.1
    assert list(victim.due("update", 2)) == []
    now_s += 0.2
    assert list(other.due("update", 2)) == []
    assert list(victim.due("forward", 3)) == []
    assert list(victim.due("update", 3)) == [first]
    now_s += 100
    assert list(victim.due("update", 9)) == list(other.due("update", 9)) == []  # the run ends of the first
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    victim = points(tmp_path, faults, second.rank)
    assert list(victim.due("update", 1)) == []
    now_s += 15
    assert list(victim.due("update", 2)) == [second]
    now_s += 100
    assert list(victim.due("update", 3)) == []


@pytest.mark.parametrize(
    ("call", "code", "least_s"),
    [
        ("'kill'", -9, 0),
        ("'exit'", 0, 0),
        ("'raise'", 1, 0),
        ("'spin', 0.2", 7, 0.2),
        ("'stop', 0.2", 7, 0.2),
    ],
)
def test_what_happens_to_a_process(call: str, code: int, least_s: float) -> None:
    text = f"from shardwright.testing.faults import happen; happen({call}); raise SystemExit(7)"
    began_s = time.monotonic()
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, timeout=30, check=False)
    assert found.returncode == code
    assert time.monotonic() - began_s >= least_s


def test_who_holds_the_interpreter_lets_no_thread_run() -> None:
    text = """
import threading, time
from shardwright.testing.faults import happen
beats = []
def beat():
    while True:
        beats.append(time.monotonic()); time.sleep(0.01)
threading.Thread(target=beat, daemon=True).start()
time.sleep(0.1); happen("gil", 0.5); time.sleep(0.1)
print(max(b - a for a, b in zip(beats, beats[1:])))
"""
    found = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=30, check=True
    )
    assert float(found.stdout) > 0.4  # whole seconds, from a moment inside of one


def test_a_full_disk_says_so() -> None:
    with pytest.raises(OSError, match="No space left"):
        happen("full_disk")


def test_a_file_of_json_is_read(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    path.write_text(json.dumps({"faults": [{"kind": "kill", "rank": 0}]}))
    assert Faults.read(path).faults[0].phase == "forward"
