"""What to do about the largest part of a step."""

import pytest

from observe.plans import two_stage_plan
from shardwright.observe.report.verdict import _remedy
from shardwright.plan import Alternative


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
