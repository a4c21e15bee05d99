"""A plan in one line."""

import pytest

from observe.plans import two_stage_plan
from shardwright.observe.plan_text import title_of
from shardwright.plan import Plan


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
