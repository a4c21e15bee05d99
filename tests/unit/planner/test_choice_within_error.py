"""Within the error of predictions the simplest plan wins, and that of the last run stays.

Whether sequences are cut between layers, where the settings leave that to the planner.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from graphs import GraphBuilder, profile_of

from planner.machines import machines
from shardwright.config import Config
from shardwright.errors import InfeasiblePlanError, PlanError
from shardwright.mesh import Mesh
from shardwright.model_graph import ModelGraph
from shardwright.plan import Plan
from shardwright.planner import Candidates, make_plan
from shardwright.planner.degrees import with_or_without_sequences

STAYS = "It is that of the last run: no other is faster by more than predictions err."


def blocks_in_parts(num_blocks: int) -> ModelGraph:
    """``embed``, for each block ``h.0.attention`` and ``h.0.mlp``, ``head``."""
    builder = GraphBuilder()
    names = [f"h.{block}.{part}" for block in range(num_blocks) for part in ("attention", "mlp")]
    value = None
    for name in ("embed", *names, "head"):
        weight = builder.parameter(f"{name}.weight", 400)
        kind = name.rpartition(".")[2]
        value = builder.unit(name, [] if value is None else [value], parameters=[weight], cost_class=kind)
    assert value is not None
    return builder.graph(builder.op("cross_entropy", [value], output_bytes=4))


def candidates(*counts: int, head_s: float = 1.0, spread: float = 0.0, blocks: int = 4) -> Candidates:
    found = {}
    for m in counts:
        seconds = {"embed": 0.1, "attention": 1.0, "mlp": 1.0, "head": head_s}
        costs = {name: (each / m, 2 * each / m) for name, each in seconds.items()}
        found[m] = (blocks_in_parts(blocks), profile_of(costs, spread=spread))
    return found


def plan(options: Candidates, *, previous: Plan | None = None, **config: Any) -> Plan:
    return make_plan(
        options,
        cluster=machines(),
        config=Config.parse(config),
        mesh=Mesh.of(world_size=2, pipeline=2),
        previous=previous,
    )


def first_units(found: Plan) -> list[str]:
    return [stage.units[0] for stage in found.stages]


def test_cuts_fall_between_blocks_unless_that_costs_more_than_the_error() -> None:
    """With the head, the best balance is in the middle of a block."""
    sure = plan(candidates(8, head_s=2.0, blocks=4), pipeline="1f1b")
    assert first_units(sure) == ["embed", "h.2.mlp"]
    uncertain = plan(candidates(8, head_s=2.0, blocks=4, spread=0.4), pipeline="1f1b")
    assert first_units(uncertain)[1] in ("h.2.attention", "h.3.attention")


def test_the_plan_of_the_last_run_stays_within_the_error() -> None:
    before = plan(candidates(4))
    slower = candidates(4, head_s=1.3)
    anew = plan(slower)
    again = plan(slower, previous=before)
    assert [stage.units for stage in again.stages] == [stage.units for stage in before.stages]
    assert again.schedule == before.schedule
    assert (STAYS in again.why) == ([s.units for s in anew.stages] != [s.units for s in before.stages])


def test_the_plan_of_the_last_run_goes_where_another_is_much_faster() -> None:
    before = plan(candidates(4))
    after = plan(candidates(4, head_s=8.0), previous=before)
    assert [stage.units for stage in after.stages] == [
        stage.units for stage in plan(candidates(4, head_s=8.0)).stages
    ]
    assert STAYS not in after.why


def test_a_plan_for_other_units_or_settings_is_no_plan_of_the_last_run() -> None:
    other = plan(candidates(4, blocks=3))
    assert plan(candidates(4), previous=other) == plan(candidates(4))
    gpipe = plan(candidates(4), pipeline="gpipe")
    assert plan(candidates(4), previous=gpipe, pipeline="1f1b").schedule.kind == "1f1b"


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
