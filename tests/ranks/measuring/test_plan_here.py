"""Plans that are tried on the machines that are present, and profiles that others are made from."""

import pytest
import torch
from torch import nn

from shardwright.testing import run_ranks


def training():
    from shardwright.torch.plan_here import Training

    def build():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))

    return Training(build=build, arguments=((torch.ones(8, 64),), {}), loss=lambda y: y.square().mean())


def planned(settings, *, most):
    from shardwright.config import Config
    from shardwright.torch.plan_here import plan_here

    return plan_here(training(), config=Config.parse(settings), most=most, steps=2).to_json()


@pytest.mark.thorough
def test_the_fastest_of_the_trials_is_kept():
    import shardwright.torch as sw
    from shardwright.plan import Plan

    texts = run_ranks(planned, 2, {}, most=3)
    assert texts[0] == texts[1]
    plan = Plan.parse(texts[0])
    of_sample = [trial.step_s / trial.mesh.data for trial in plan.trials]
    assert len(plan.trials) == 3
    assert (plan.trials[0].mesh, plan.trials[0].schedule) == (plan.mesh, plan.schedule)
    assert of_sample[0] <= 1.01 * min(of_sample)
    assert len({(t.mesh.pipeline, t.mesh.shard, t.schedule.microbatches) for t in plan.trials}) == 3
    assert any(reason.startswith("Tried on the present machines") for reason in plan.why)
    assert not sw.is_initialized()


@pytest.mark.thorough
def test_degrees_that_are_set_stay():
    from shardwright.plan import Plan

    plan = Plan.parse(run_ranks(planned, 2, {"pipeline_parallel_degree": 2, "microbatches": 4}, most=3)[0])
    assert (plan.mesh.pipeline, plan.schedule.microbatches) == (2, 4)
    assert len(plan.trials) == 1


def one_process():
    return planned({}, most=2)


def test_a_single_process_has_trials_too():
    from shardwright.plan import Plan

    plan = Plan.parse(run_ranks(one_process, 1)[0])
    assert plan.mesh.world_size == 1
    assert len(plan.trials) == 2


def with_refusals(how_many):
    """Trials of which the first `how_many` are refused on all ranks, as by a runtime that lacks something."""
    from shardwright.errors import UsageError
    from shardwright.torch import plan_here as module

    before, left = module.try_plan, [how_many]

    def try_plan(*args, **kwargs):
        if left[0]:
            left[0] -= 1
            raise UsageError("it does not run here.")
        return before(*args, **kwargs)

    module.try_plan = try_plan
    try:
        return planned({}, most=2)
    except UsageError as error:
        return str(error)
    finally:
        module.try_plan = before


@pytest.mark.thorough
def test_a_plan_that_does_not_run_is_told_and_the_others_are_tried():
    from shardwright.plan import Plan

    plan = Plan.parse(run_ranks(with_refusals, 2, 1)[0])
    assert len(plan.trials) == 1
    assert any(
        reason.startswith("Could not be tried: pipeline") and reason.endswith("it does not run here.")
        for reason in plan.why
    )
