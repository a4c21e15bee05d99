"""Whether sequences are cut between layers, where the settings leave that to the planner."""

from types import SimpleNamespace

import pytest

from shardwright.config import Config
from shardwright.errors import InfeasiblePlanError, PlanError
from shardwright.planner.degrees import with_or_without_sequences


class FakePlan(SimpleNamespace):
    def model_copy(self, *, update):
        return FakePlan(**{**vars(self), **update})


def chosen(setting, *, whole, cut, tensor=2, last=None, **settings):
    """Whether the plan has cut sequences, why, and which settings were asked for; errors stand for plans."""
    asked = []

    def plan_with(config):
        asked.append(config.sequence_parallel)
        outcome = cut if config.sequence_parallel is True else whole
        if isinstance(outcome, Exception):
            raise outcome
        is_cut = config.sequence_parallel is True
        return FakePlan(is_cut=is_cut, why=("first",), prediction=SimpleNamespace(step_s=outcome))

    config = Config(sequence_parallel=setting, tensor_parallel_degree=tensor, **settings)
    between = None if last is None else SimpleNamespace(tensor=SimpleNamespace(between_units=last["between"]))
    plan = with_or_without_sequences(config, plan_with, previous=between)
    return plan.is_cut, plan.why[1:], asked


def test_the_shorter_step_wins():
    assert chosen("auto", whole=2.0, cut=1.0)[0] is True
    is_cut, why, asked = chosen("auto", whole=1.0, cut=2.0)
    assert is_cut is False
    assert asked == [False, True]
    assert why == ("Sequences stay whole between layers: 2.00 s a step if they are cut, 1.00 s if not.",)


def test_context_ranks_cut_sequences_in_any_case():
    """Bug: "Sequences stay whole between layers", of a grid whose context ranks had cut them."""
    _, (said,), _ = chosen("auto", whole=1.0, cut=2.0, context_parallel_degree=2)
    assert said.startswith(
        "Parts of a batch stay as they are between layers, whole on each tensor rank: 2.00"
    )
    _, (said,), _ = chosen("auto", whole=2.0, cut=1.0, context_parallel_degree=2)
    assert said.startswith(
        "Parts of a batch are cut again between layers, along the sequence over tensor ranks: 1.00 s a step"
    )


def test_what_fits_wins():
    large = InfeasiblePlanError("too large")
    assert chosen("auto", whole=large, cut=1.0)[:2] == (
        True,
        ("Sequences are cut between layers: without that, tensors between layers do not fit.",),
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
