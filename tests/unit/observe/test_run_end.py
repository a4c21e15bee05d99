"""The last lines of a run: what it came to beside its prediction, and why the two part."""

from typing import Any

import pytest

from observe.plans import two_stage_plan
from shardwright.observe import StepRecord
from shardwright.observe.summary import RunTotals, format_end
from shardwright.plan import Plan


def totals(*seconds: float, **fields: Any) -> RunTotals:
    found = RunTotals()
    for step, each in enumerate(seconds, start=fields.pop("first", 1)):
        found.add(StepRecord(step=step, seconds=each, **{"samples": 8, **fields}))
    return found


def predicting(step_s: float, **fields: Any) -> Plan:
    plan = two_stage_plan()
    assert plan.prediction is not None
    return plan.model_copy(
        update={"prediction": plan.prediction.model_copy(update={"step_s": step_s, **fields})}
    )


# Three microbatches of two stages that take 0.3 s each: 1.8 s of work in a step.


def test_one_line_where_all_went_as_predicted() -> None:
    found = totals(9.0, 1.0, 1.1, 1.2, loss=3.2145, tokens=440, work_s=1.8)
    assert format_end(found, predicting(1.2), replicas=1, further=["report runs/a/report.html"]) == (
        "done: 4 steps, loss 3.2145 | 400 tok/s | 1.64 times one process | "
        "step 1.10 s, 8% faster than predicted (1.20 s)\n"
        "  report runs/a/report.html"
    )


def test_code_outside_of_the_units_is_told() -> None:
    """A frozen teacher beside the model: "units took 34 times what they took alone", they said."""
    found = totals(9.0, 4.0, 4.0, work_s=5.0, outside_s=1.6)
    assert format_end(found, predicting(1.0), replicas=1) == (
        "done: 3 steps | 2.00 samples/s | step 4.00 s, 4.0 times the predicted 1.00 s\n"
        "  the step took 4.0 times its prediction: 1.60 s of it are code outside of the model's units, which "
        "every rank runs and this plan does not count (a teacher? make it a part of the wrapped model)"
    )


def test_a_first_step_is_not_compared() -> None:
    """It traces and plans: "the step took 1116.7 times its prediction" said nothing."""
    assert format_end(totals(2.0), predicting(0.01), replicas=1) == (
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
    line = format_end(totals(9.0, seconds, work_s=work_s), predicting(1.2), replicas=1).splitlines()[1]
    assert line.startswith(f"  the step took {reason}")


def test_a_prediction_from_estimates_says_so() -> None:
    text = format_end(totals(9.0, 2.4), predicting(1.2, provenance="estimated"), replicas=1)
    assert "which rests on estimates: profile: measured times the units" in text
