"""Names and numbers of ``metrics.jsonl``."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.observe import Metric, MetricsLog, StepRecord, read_json_lines

FULL = StepRecord(
    step=120,
    seconds=0.5,
    loss=3.25,
    samples=16,
    tokens=4096,
    flops=2e12,
    bubble_measured=0.11,
    bubble_predicted=0.1,
    step_predicted_s=0.45,
    memory_bytes=(2**30, 3 * 2**30),
    memory_limit_bytes=24 * 2**30,
    learning_rate=1e-3,
    work_s=0.9,
    outside_s=0.03,
    update_s=0.02,
    skipped_updates=2,
)
BARE = StepRecord(step=1, seconds=2.0, samples=8)


def test_everything_that_is_known(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", world_size=2, wall=lambda: 1_795_000_000.12345)
    log.append(FULL)
    log.append(BARE)
    log.close()
    first, second = read_json_lines(tmp_path / "metrics.jsonl")
    assert first == {
        "step": 120,
        "time/unix(s)": 1_795_000_000.123,
        "train/loss": 3.25,
        "train/learning_rate": 1e-3,
        "time/step(s)": 0.5,
        "time/step_predicted(s)": 0.45,
        "time/work(s)": 0.9,
        "time/outside_units(s)": 0.03,
        "time/update(s)": 0.02,
        "train/skipped(updates)": 2,
        "time/above_prediction(share)": pytest.approx(1 / 9),
        "throughput/samples(1/s)": 32.0,
        "throughput/tokens(1/s)": 8192.0,
        "throughput/compute(FLOP/s)": 4e12,
        "throughput/compute_per_rank(FLOP/s)": 2e12,
        "memory/peak(GiB)": 3.0,
        "memory/peak_by_rank(GiB)": [1.0, 3.0],
        "memory/limit(GiB)": 24.0,
        "pipeline/bubble(share)": 0.11,
        "pipeline/bubble_predicted(share)": 0.1,
    }
    assert set(second) == {"step", "time/unix(s)", "time/step(s)", "throughput/samples(1/s)"}


def test_a_lost_loss_is_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", world_size=1)
    log.append(replace(BARE, loss=math.nan))
    log.close()
    assert read_json_lines(tmp_path / "metrics.jsonl")[0]["train/loss"] == "NaN"


@pytest.mark.parametrize("name", list(Metric))
def test_names_are_group_name_unit(name: str) -> None:
    assert re.fullmatch(
        r"(train|time|throughput|memory|communication|pipeline|goodput|ranks)/[a-z_]+(\([A-Za-z1/]+\))?", name
    )
