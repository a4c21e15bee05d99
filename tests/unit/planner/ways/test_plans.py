"""From the ways of a search to a plan."""

from dataclasses import replace

import pytest
from planned import planned

from shardwright.catalogue import find_architecture
from shardwright.cluster import parse_inventory
from shardwright.errors import PlanError
from shardwright.planner.ways import Task, search
from shardwright.planner.ways.answers import best_plan


def answer_of(**changed):
    given = {
        "model": find_architecture("gpt2-1.5b"),
        "machines": parse_inventory("p4d.24xlarge"),
        "batch": 64,
    }
    return search(Task(**{**given, "only_what_runs": True, **changed}))


def test_the_plan_with_the_shortest_step_is_taken():
    answer, seconds = answer_of(), iter((0.3, 0.1, 0.2))
    asked = []

    def make(samples, settings):
        asked.append((samples, settings["data_parallel_degree"]))
        return planned(forward_s=next(seconds))

    plan = best_plan(answer, make)
    assert plan.prediction.step_s == planned(forward_s=0.1).prediction.step_s
    assert len(asked) == 3
    assert all(samples * data == 64 for samples, data in asked)
    assert f"Searched: of {answer.num_ways} ways" in plan.why[-1]


def test_what_this_version_does_not_run_is_said():
    machines, pins = parse_inventory("p4d.24xlarge*8"), {"tensor": 4, "offload": 1, "sharded": 0}
    model = find_architecture("gpt-neox-13b")
    answer = answer_of(model=model, machines=machines, only_what_runs=False, pins=pins)
    missing = "needs offload of optimizer state, which this version does not run yet"
    with pytest.raises(PlanError, match=missing):
        best_plan(answer, lambda samples, settings: planned())
    runs = answer_of()
    mixed = replace(runs, best=answer.best, alternatives=(runs.best,))
    plan = best_plan(mixed, lambda samples, settings: planned())
    assert f"{missing}. Searched:" in plan.why[-1]
