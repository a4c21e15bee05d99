"""The last lines of a run: what it came to beside its prediction, and why the two part.

A plan in one line.

What to do about the largest part of a step.

The closing block of a run.
"""

from pathlib import Path
from typing import Any

import pytest

from observe.plans import two_stage_plan
from shardwright.errors import UsageError
from shardwright.observe import MetricsLog, RunFolder, StepRecord, format_summary, summarize
from shardwright.observe.plan_text import title_of
from shardwright.observe.report.verdict import _remedy
from shardwright.observe.summary import RunTotals, format_end
from shardwright.plan import Alternative, Plan


def totals(*seconds: float, **fields: Any) -> RunTotals:
    found = RunTotals()
    for step, each in enumerate(seconds, start=fields.pop("first", 1)):
        found.add(StepRecord(step=step, seconds=each, **{"samples": 8, **fields}))
    return found


def predicting(step_s: float, **fields: Any) -> Plan:
    """Of one replica."""
    plan = two_stage_plan()
    assert plan.prediction is not None
    predicted = plan.prediction.model_copy(update={"step_s": step_s, **fields})
    return plan.model_copy(update={"prediction": predicted, "mesh": plan.mesh.model_copy(update={"data": 1})})


# Three microbatches of two stages that take 0.3 s each: 1.8 s of work in a step.


def test_one_line_where_all_went_as_predicted() -> None:
    found = totals(9.0, 1.0, 1.1, 1.2, loss=3.2145, tokens=440, work_s=1.8)
    assert format_end(found, predicting(1.2), further=["report runs/a/report.html"]) == (
        "done: 4 steps, loss 3.2145 | 400 tok/s | 1.64 times one process | "
        "step 1.10 s, 8% faster than predicted (1.20 s)\n"
        "  report runs/a/report.html"
    )


def test_code_outside_of_the_units_is_told() -> None:
    """A frozen teacher beside the model: "units took 34 times what they took alone", they said."""
    found = totals(9.0, 4.0, 4.0, work_s=5.0, outside_s=1.6)
    assert format_end(found, predicting(1.0)) == (
        "done: 3 steps | 2.00 samples/s | step 4.00 s, 4.0 times the predicted 1.00 s\n"
        "  the step took 4.0 times its prediction: 1.60 s of it are code outside of the model's units, which "
        "every rank runs and this plan does not count (a teacher? make it a part of the wrapped model)"
    )


def test_a_first_step_is_not_compared() -> None:
    """It traces and plans: "the step took 1116.7 times its prediction" said nothing."""
    assert format_end(totals(2.0), predicting(0.01)) == (
        "done: 1 step | 4.00 samples/s | step 2.00 s, which traced and planned"
    )


@pytest.mark.parametrize(
    ("seconds", "work_s", "reason"),
    [
        (
            2.4,
            5.4,
            "2.0 times its prediction: units took 3.0 times what they took alone (the machine was busy)",
        ),
        (2.4, 1.8, "2.0 times its prediction: units took what they took alone, so ranks waited longer"),
        (0.6, 0.9, "0.5 times its prediction: units took 0.5 times what they took alone (it was busy then)"),
        (0.6, 1.8, "0.5 times its prediction: units took what they took alone, so ranks waited less"),
        (2.4, None, "2.0 times its prediction"),
    ],
)
def test_the_reason_where_they_part(seconds: float, work_s: float | None, reason: str) -> None:
    line = format_end(totals(9.0, seconds, work_s=work_s), predicting(1.2)).splitlines()[1]
    assert line.startswith(f"  the step took {reason}")


def test_a_prediction_from_estimates_says_so() -> None:
    text = format_end(totals(9.0, 2.4), predicting(1.2, provenance="estimated"))
    assert "which rests on estimates: profile: measured times the units" in text


def plan(**predicted: float | str) -> Plan:
    """Two stages on each of two replicas."""
    found = two_stage_plan()
    assert found.prediction is not None
    return found.model_copy(update={"prediction": found.prediction.model_copy(update=predicted)})


@pytest.mark.parametrize(
    ("alone_s", "provenance", "said"),
    [(1.8, "measured", True), (2.1, "measured", False), (0.0, "measured", False), (1.8, "estimated", False)],
)
def test_where_one_process_is_faster_the_plan_says_so(alone_s: float, provenance: str, said: bool) -> None:
    """Two ranks took 49 ms a step where one took 6.6 ms, without a word."""
    title = title_of(plan(step_s=4.0, provenance=provenance, alone_s=alone_s))
    assert title.count("faster") == said, title
    assert title.endswith("; one process alone is faster: 3.60 s for as many samples") is said, title


def test_where_replicas_are_faster_the_plan_says_so() -> None:
    """Four replicas have twice the samples of two."""
    title = title_of(plan(step_s=4.0, provenance="measured", replicas_s=6.0))
    assert title.endswith("; 4 replicas are faster: 3.00 s for as many samples"), title
    assert "faster" not in title_of(plan(step_s=4.0, provenance="measured", replicas_s=8.5))


@pytest.mark.parametrize(
    ("kind", "other", "offered", "remedy"),
    [
        ("bubble", ("gpipe", 3), "zb_v", True),
        ("bubble", ("zb_v", 3), "zb_v", False),
        ("overhead", ("gpipe", 6), "fewer microbatches", True),
        ("overhead", ("gpipe", 2), "fewer microbatches", False),
    ],
)
def test_it_does_not_offer_what_a_runner_up_has(
    kind: str, other: tuple[str, int], offered: str, remedy: bool
) -> None:
    """Reports offered zb_v, and fewer microbatches, above a table in which both were slower."""
    schedule, microbatches = other
    runner_up = Alternative(
        schedule=schedule, microbatches=microbatches, stages=2, step_s=2.0, peak_bytes=1, verdict="slower"
    )
    plan = two_stage_plan().model_copy(update={"alternatives": (runner_up,)})
    assert (offered in _remedy(kind, plan)) is remedy


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
    assert format_summary(summarize(folder)) == (
        "4 steps done\n"
        "  loss        3.2500 (10.5000 at the first step)\n"
        "  throughput  8.0k tok/s\n"
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
