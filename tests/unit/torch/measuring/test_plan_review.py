"""The recorded steps of a run, compared with its plan."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graphs import GraphBuilder, profile_of
from planner.machines import machines

from shardwright.config import Config
from shardwright.mesh import Mesh
from shardwright.observe.timeline import MeasuredEvent
from shardwright.plan import Plan
from shardwright.planner import make_plan
from shardwright.profile import Profile
from shardwright.schedule import Action, Kind
from shardwright.torch.measuring.last_plan import LastPlan
from shardwright.torch.measuring.plan_review import PlanReview
from shardwright.torch.measuring.reporting import Reporter


def chain(num_units: int = 8) -> Any:
    builder = GraphBuilder()
    value = builder.unit("u.0", cost_class="first")
    for number in range(1, num_units):
        value = builder.unit(f"u.{number}", [value], cost_class="other")
    return builder.graph(value)


GRAPH = chain()
COSTS = profile_of({"first": (0.1, 0.2), "other": (0.1, 0.2)})


def plan_with(profile: Profile, previous: Plan | None = None) -> Plan:
    return make_plan(
        {4: (GRAPH, profile)},
        cluster=machines(),
        config=Config.parse({"pipeline": "1f1b"}),
        mesh=Mesh.of(world_size=2, pipeline=2),
        previous=previous,
    )


def step(*stage_s: float) -> list[MeasuredEvent]:
    """Four microbatches, with a message that is no work, and waiting before each action."""
    found = []
    for stage, seconds in enumerate(stage_s):
        for number in range(4):
            found += [
                MeasuredEvent(stage, Action(Kind.FORWARD, stage, number), 0.0, 1.0 + seconds / 3, 1.0),
                MeasuredEvent(stage, Action(Kind.BACKWARD, stage, number), 0.0, 2 * seconds / 3),
                MeasuredEvent(stage, Action(Kind.SEND_F, stage, number), 0.0, 9.0),
            ]
    return found


@pytest.fixture
def kept() -> list[dict[str, float]]:
    return []


@pytest.fixture
def review(kept: list[dict[str, float]]) -> PlanReview:
    first = plan_with(COSTS)
    return PlanReview(
        graph=GRAPH,
        profile=COSTS,
        plan=first,
        before={"u.0": 2.0},
        plan_with=lambda profile: plan_with(profile, first),
        keep=lambda factors: kept.append(dict(factors)),
    )


def test_steps_as_planned_change_nothing(review: PlanReview, kept: list[dict[str, float]]) -> None:
    for seconds in (9.0, 5.0, 1.2, 1.2, 1.2):  # the first two trace and warm up
        review.step_recorded(step(seconds, 1.2))
    assert review.next_plan() is None
    assert kept == []


def test_few_steps_teach_nothing(review: PlanReview, kept: list[dict[str, float]]) -> None:
    """One or two may be a slow second of the machine."""
    for _ in range(4):
        review.step_recorded(step(3.0, 1.0))
    assert review.next_plan() is None
    assert kept == []


def test_a_slow_stage_gives_the_next_run_other_cuts(review: PlanReview, kept: list[dict[str, float]]) -> None:
    for _ in range(6):
        review.step_recorded(step(3.0, 1.0))
    found = review.next_plan()
    assert found is not None
    assert len(found.plan.stages[0].units) < len(review.plan.stages[0].units)
    assert "1f1b with cuts before u." in found.text
    assert len(kept) == 1  # the same steps are not written down again
    assert kept[0]["u.0"] > 2 * kept[0]["u.1"]


def test_code_outside_of_the_model_is_no_part_of_its_units(review: PlanReview) -> None:
    """Bug: of a stage of few units, a teacher that every rank ran made the units look slow."""
    for _ in range(6):
        review.step_recorded(step(1.2 + 2.0, 1.2 + 2.0), outside_s=4 * 2.0)
    assert review._stage_s[-1] == pytest.approx((1.2, 1.2), rel=1e-3)
    assert review.next_plan() is None


def test_one_disturbed_step_does_not_count(review: PlanReview) -> None:
    for seconds in (1.2, 1.2, 1.2, 1.2, 9.0):
        review.step_recorded(step(seconds, 1.2))
    assert review.next_plan() is None


def test_factors_are_kept_however_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product of two runs became 0 where a unit is far cheaper than planned, and no factor was used."""
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    run: Any = SimpleNamespace(
        device=torch.device("cpu"), local_size=2, config=Config(), mesh=Mesh.of(world_size=2, pipeline=2)
    )
    last = LastPlan(run, torch.nn.Linear(2, 2), samples=4)
    timed_s = {"u.0": 0.1, "u.1": 0.2}
    last.write_factors({"u.0": 1.23456e-5, "u.1": 2.0}, timed_s=timed_s)
    assert last.read_factors(timed_s) == {"u.0": 1.235e-5, "u.1": 2.0}
    run.config = Config(plan_anew=True)
    assert last.read_factors(timed_s) == {}


def test_a_factor_goes_with_the_time_that_it_corrects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a unit that had been timed wrongly was timed anew, and its old factor was applied to that."""
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    run: Any = SimpleNamespace(
        device=torch.device("cpu"), local_size=2, config=Config(), mesh=Mesh.of(world_size=2, pipeline=2)
    )
    last = LastPlan(run, torch.nn.Linear(2, 2), samples=4)
    timed_s = {f"u.{number}": 0.1 for number in range(4)}
    factors = {"u.0": 3.0, "u.1": 0.9, "u.2": 0.9, "u.3": 0.9}
    last.write_factors(factors, timed_s=timed_s)
    busier = {label: 2 * seconds for label, seconds in timed_s.items()}
    assert last.read_factors(busier) == factors
    anew = last.read_factors({**timed_s, "u.0": 0.3, "u.9": 1.0})
    assert anew == {"u.1": 0.9, "u.2": 0.9, "u.3": 0.9}


@pytest.mark.parametrize(("num_steps", "reviewed"), [(4, False), (5, True)])
def test_a_run_too_short_to_be_reviewed_leaves_what_an_earlier_part_found(
    review: PlanReview, num_steps: int, reviewed: bool
) -> None:
    """Bug: a run that went on for a few steps removed next_plan.json of the part before."""
    for _ in range(num_steps):
        review.step_recorded(step(1.2, 1.2))
    reporter = Reporter(SimpleNamespace(rank=0, config=Config(), optimizers=[]))  # type: ignore[arg-type]
    closed: dict[str, Any] = {}
    reporter._observer = SimpleNamespace(close=closed.update)  # type: ignore[assignment]
    reporter.reviewed_by(review)
    reporter.close()
    assert closed["reviewed"] is reviewed
