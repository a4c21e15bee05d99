"""How a plan records the cuts of parameters."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_plan import GRAPH, edited, make_plan, refusal

from shardwright.errors import StalePlanError
from shardwright.placement import Cut
from shardwright.plan import MeshPlan, Plan, TensorPlan, TensorPrices
from shardwright.plan.tensor_plan import cuts_by_name, cuts_by_pattern

ROWS, COLUMNS = Cut.even(0, 6, num_ranks=2), Cut.even(1, 4, num_ranks=2)
SHAPES = {
    "embed.weight": (9, 4),
    "h.0.up": (6, 4),
    "h.1.up": (6, 4),
    "h.0.w2.down": (6, 4),
    "h.1.w2.down": (6, 4),
}

PRICES = TensorPrices(latency_s=2e-5, bandwidth_Bps=2e9, flops_per_s=5e10, memory_Bps=1e10)


def test_parameters_of_a_role_share_a_line():
    cuts = {"h.0.up": ROWS, "h.1.up": ROWS, "h.0.w2.down": COLUMNS, "embed.weight": COLUMNS}
    assert cuts_by_pattern(cuts, list(SHAPES)) == {
        "embed.weight": COLUMNS,
        "h.*.up": ROWS,
        "h.0.w2.down": COLUMNS,
    }


@given(st.dictionaries(st.sampled_from(sorted(SHAPES)), st.sampled_from([ROWS, COLUMNS])))
def test_a_record_says_what_was_recorded(cuts):
    fitting = {name: cut for name, cut in cuts.items() if SHAPES[name][cut.dim] == cut.size}
    assert cuts_by_name(cuts_by_pattern(fitting, list(SHAPES)), SHAPES) == fitting


def test_cuts_of_another_model_are_refused():
    with pytest.raises(StalePlanError, match=r"the plan cuts g\.\*\.up, head, but the model has no such"):
        cuts_by_name({"g.*.up": ROWS, "head": ROWS, "h.*.up": ROWS}, SHAPES)
    with pytest.raises(StalePlanError, match=r"for embed\.weight, of 6 slices, but that has shape \(9, 4\)"):
        cuts_by_name({"embed.weight": ROWS}, SHAPES)
    with pytest.raises(StalePlanError, match=r"of 3 slices, but that has shape \(9, 4\)"):
        cuts_by_name({"embed.weight": Cut.even(2, 3, num_ranks=2)}, SHAPES)


def test_files_of_degree_1_are_as_they_were():
    document = json.loads(make_plan().to_json())
    assert "tensor" not in document
    assert set(document["mesh"]) == {"pipeline", "data", "shard", "placement_strategy"}


def tensor_plan(cuts, *, data=1):
    tensor = TensorPlan(prices=PRICES, cuts=cuts)
    return make_plan(mesh=MeshPlan(pipeline=2, data=data, tensor=2), tensor=tensor)


def test_a_plan_with_a_tensor_degree_comes_back_from_its_file():
    plan = tensor_plan({"h.*.weight": ROWS}, data=2)
    document = json.loads(plan.to_json())
    assert document["mesh"]["tensor"] == 2
    assert document["tensor"]["cuts"] == {"h.*.weight": "cut 0 (r0:3 r1:3)"}
    assert Plan.parse(plan.to_json()) == plan
    assert plan.mesh.grid.world_size == 8
    with pytest.raises(
        StalePlanError, match=r"pipeline\(2\) \* data\(2\) \* tensor\(2\) = 8 ranks, but 4 are"
    ):
        plan.check(GRAPH, world_size=4)


def test_the_cuts_of_a_model_are_checked_against_it():
    with pytest.raises(StalePlanError, match="no such parameters"):
        tensor_plan({"nowhere": ROWS}).cuts_of(GRAPH)
    name, spec = next(iter(GRAPH.parameters.items()))
    cut = Cut.even(0, spec.spec.shape[0], num_ranks=2)
    assert tensor_plan({name: cut}).cuts_of(GRAPH) == {name: cut}
    assert make_plan().cuts_of(GRAPH) == {}


@pytest.mark.parametrize(
    ("cut", "text"),
    [
        (
            "cut 0 (r0:3 r2:3)",
            "cut 0 (r0:3 r2:3), but 2 ranks share layers: they run from 0 to 1",
        ),
        ("cut 0", "'cut 0' is no cut such as 'cut 0 (r0:2 r1:3)'"),
        (3, "it must be a text such as"),
    ],
)
def test_cuts_that_cannot_be(cut, text):
    tensor = {"prices": PRICES.model_dump(), "cuts": {"w": cut}}
    assert text in refusal(edited(mesh={"pipeline": 2, "tensor": 2}, tensor=tensor))


def test_a_plan_with_tensor_and_context_degrees():
    """Parts of parameters are those of the tensor ranks; files name what is cut again where it is."""
    mesh = {"pipeline": 2, "tensor": 2, "context": 2}
    tensor = TensorPlan(prices=PRICES, cuts={"w": ROWS}, between_units=1, cut_again=1)
    plan = make_plan(mesh=MeshPlan(**mesh), tensor=tensor)
    assert Plan.parse(plan.to_json()) == plan
    assert (plan.mesh.grid.share, plan.mesh.grid.parts) == (4, 2)
    shared = {"prices": PRICES.model_dump(), "cuts": {"w": "cut 0 (r0:3 r3:3)"}, "between_units": 1}
    assert "but 2 ranks share layers" in refusal(edited(mesh=mesh, tensor=shared))
    alone = {"prices": PRICES.model_dump(), "between_units": 1, "cut_again": 1}
    assert "tensor.cut_again is 1" in refusal(edited(mesh={**mesh, "context": 1}, tensor=alone))
    whole = {"prices": PRICES.model_dump()}
    assert "tensor.between_units, the dimension" in refusal(edited(mesh=mesh, tensor=whole))
    assert "two of them go together at most" in refusal(edited(mesh={**mesh, "expert": 2}, tensor=shared))


def test_a_plan_with_tensor_and_expert_degrees():
    """Cuts of experts number all ranks that share a batch, and are told from those of layers."""
    mesh = {"pipeline": 2, "tensor": 2, "expert": 2}
    experts = Cut.even(0, 8, num_ranks=4)
    cuts = {"h.0.up": ROWS, "h.1.up": ROWS, "h.0.w": experts, "h.1.w": experts}
    tensor = TensorPlan.of(cuts, list(cuts), PRICES, between_units=0, experts=["h.0.w", "h.1.w"])
    assert tensor.experts == ("h.*.w",)
    plan = make_plan(mesh=MeshPlan(**mesh), tensor=tensor)
    assert Plan.parse(plan.to_json()) == plan
    given = {"prices": PRICES.model_dump(), "cuts": {"w": "cut 0 (r0:3 r3:3)"}, "between_units": 0}
    assert "but 2 ranks share layers" in refusal(edited(mesh=mesh, tensor=given))
    assert "names v, which tensor.cuts does not" in refusal(
        edited(mesh=mesh, tensor={**given, "experts": ["v"]})
    )
    few = {**given, "cuts": {"w": "cut 0 (r0:3 r1:3)"}, "experts": ["w"]}
    alone = edited(mesh={**mesh, "tensor": 1}, tensor=few)
    assert "tensor.experts, which tells" in refusal(alone)
