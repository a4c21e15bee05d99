"""The closing block of a run."""

from pathlib import Path

import pytest

from observe.plans import two_stage_plan
from shardwright.errors import UsageError
from shardwright.observe import MetricsLog, RunFolder, StepRecord, format_summary, summarize


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, name="demo", environ={})


def write_steps(folder: RunFolder, *records: StepRecord) -> None:
    log = MetricsLog(folder.metrics_file, world_size=2)
    for record in records:
        log.append(record)
    log.close()


def training(*, tokens: int | None = 4000) -> list[StepRecord]:
    return [
        StepRecord(
            step=step,
            seconds=seconds,
            samples=8,
            tokens=tokens,
            loss=loss,
            bubble_measured=0.3,
            bubble_predicted=0.25,
            step_predicted_s=0.45,
        )
        for step, seconds, loss in ((1, 30.0, 10.5), (2, 0.4, 6.0), (3, 0.5, 4.0), (4, 0.9, 3.25))
    ]


def test_from_folder_to_text(folder: RunFolder) -> None:
    write_steps(folder, *training())
    two_stage_plan().write(folder.plan_file)
    assert format_summary(summarize(folder, single_throughput=5000.0)) == (
        "4 steps done\n"
        "  loss        3.2500 (10.5000 at the first step)\n"
        "  throughput  8.0k tok/s\n"
        "  speed-up    1.60x over one process (5.0k tok/s)\n"
        "  step        500 ms, 11% slower than predicted (450 ms)\n"
        "  bubble      30% measured, 25% predicted\n"
        "  stage  rank  units  parameters  forward  backward  sends\n"
        "  0      0     embed  2.0 KiB     100 ms   200 ms    0 B\n"
        "  1      1     head   2.0 KiB     100 ms   200 ms    0 B\n"
        f"  run folder {folder.path}"
    )


def test_steps_done_twice_count_once(folder: RunFolder) -> None:
    write_steps(folder, *training(), *training()[2:])
    assert summarize(folder).steps == 4


@pytest.mark.parametrize("text", [None, ""])
def test_a_run_without_steps(folder: RunFolder, text: str | None) -> None:
    if text is not None:
        folder.metrics_file.write_text(text)
    with pytest.raises(UsageError, match=r"metrics\.jsonl holds no step\. Run the training first"):
        summarize(folder)
