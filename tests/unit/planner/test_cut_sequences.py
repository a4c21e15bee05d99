"""Whether sequences are cut between layers, where the settings leave that to the planner."""

from types import SimpleNamespace

import pytest

from shardwright.config import Config
from shardwright.errors import InfeasiblePlanError, PlanError
from shardwright.planner.search.cut_sequences import with_or_without_sequences


class FakePlan(SimpleNamespace):
    def model_copy(self, *, update):
        return FakePlan(**{**vars(self), **update})


def chosen(setting, *, whole, cut, tensor=2, last=None):
    """Whether the plan has cut sequences, why, and which settings were asked for; errors stand for plans."""
    asked = []

    def plan_with(config):
        asked.append(config.sequence_parallel)
        outcome = cut if config.sequence_parallel is True else whole
        if isinstance(outcome, Exception):
            raise outcome
        is_cut = config.sequence_parallel is True
        return FakePlan(is_cut=is_cut, why=("first",), prediction=SimpleNamespace(step_s=outcome))

    config = Config(sequence_parallel=setting, tensor_parallel_degree=tensor)
    between = None if last is None else SimpleNamespace(tensor=SimpleNamespace(between_units=last["between"]))
    plan = with_or_without_sequences(config, plan_with, previous=between)
    return plan.is_cut, plan.why[1:], asked


def test_the_shorter_step_wins():
    assert chosen("auto", whole=2.0, cut=1.0)[0] is True
    is_cut, why, asked = chosen("auto", whole=1.0, cut=2.0)
    assert is_cut is False
    assert asked == [False, True]
    assert why == (
        "Sequences stay whole between layers: cut ones take 2.00 s a step, and 1.00 s with whole ones.",
    )


def test_what_fits_wins():
    large = InfeasiblePlanError("too large")
    assert chosen("auto", whole=large, cut=1.0)[:2] == (
        True,
        ("Sequences are cut: whole tensors between layers do not fit.",),
    )
    assert chosen("auto", whole=1.0, cut=large)[0] is False
    assert chosen("auto", whole=1.0, cut=PlanError("no sequences"))[0] is False
    with pytest.raises(InfeasiblePlanError, match="too large"):
        chosen("auto", whole=large, cut=PlanError("no sequences"))


@pytest.mark.parametrize("setting", [True, False])
def test_what_is_set_is_done(setting):
    assert chosen(setting, whole=1.0, cut=2.0) == (setting, (), [setting])
    assert chosen("auto", whole=1.0, cut=0.5, tensor=1) == (False, (), ["auto"])


def test_what_the_last_run_chose_stays_where_it_fits():
    """Two predictions that are nearly equal would take turns, and so would the last bits of losses."""
    assert chosen("auto", whole=2.0, cut=1.0, last={"between": None}) == (False, (), [False])
    assert chosen("auto", whole=1.0, cut=2.0, last={"between": 1}) == (True, (), [True])
    large = InfeasiblePlanError("too large")
    assert chosen("auto", whole=1.0, cut=large, last={"between": 1})[0] is False
