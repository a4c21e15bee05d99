"""A model over stages computes what it computes in one process: losses, gradients, parameters, buffers.

Each call of `run_ranks` runs its cases one after the other in the same processes, with a fresh model each.
Models take turns at the schedules; all of them with everything are left to the sweep at the end of this file.
What other tests say of several schedules or models, those that are quick to trace show in every run.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo_modules
from torch import Tensor, nn
from transparency import EVALUATION, Case, Iteration, Recipe, differences_by_case
from zoo import ZOO, classify, features
from zoo_modules import AddsToViews, ChangesWhatAnotherStageReads

import shardwright.torch as sw
from choices import in_every_run, some_combinations, thorough
from shardwright.testing import RanksFailedError, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::FutureWarning")

SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"pipeline": "gpipe"},
    "1f1b": {"pipeline": "1f1b"},
    "interleaved_1f1b": {"pipeline": "interleaved_1f1b", "virtual_stages": 2},
    "zb_h1": {"pipeline": "zb_h1"},
    "zb_v": {"pipeline": "zb_v"},
}
KINDS = ("1f1b", "interleaved_1f1b", "zb_v")
UNEVEN = (Iteration(), Iteration(batch_size=7))
CHANGING = (
    Iteration(batch_size=8, length=12),
    Iteration(batch_size=5, length=12),
    Iteration(batch_size=8, length=16),
    Iteration(batch_size=8, length=12),
)
SMALL_EVALUATION = Iteration(train=False, batch_size=4, length=8)


def case(settings: Mapping[str, Any] | None = None, *, microbatches: int = 4, **more: Any) -> Case:
    """A case with costs from shapes: measuring them would take most of the time of these tests."""
    config = {"microbatches": microbatches, "profile": "estimated", **(settings or {})}
    return Case(config=config, **more)


def check(recipe: Recipe, cases: Mapping[str, Case], *, num_ranks: int = 2) -> None:
    env = {"TRANSFORMERS_VERBOSITY": "error"}
    found = run_ranks(differences_by_case, num_ranks, recipe, cases, timeout_s=120, env=env)
    assert found == [{}] * num_ranks


# Other tests, most of this file, train them or their like over stages, and compare them with one process, in
# every run.
TRAINED_ELSEWHERE = (
    *("MLP", "ResNet", "3-D U-Net", "calls one module twice", "tied embeddings", "returns a dictionary"),
    *("parameters in glue", "fills one tensor", "two towers", "recomputes", "unused parameters"),
    *("LSTM", "GPT-2, recomputed", "GPT-2", "BERT", "custom functions", "dropout between blocks"),
    # With offloading.
    *("changes its input", "changes views", "changes in place", "dropout in blocks"),
    *("buffers in glue", "GPT-NeoX", "Llama", "T5", "GPT-J", "Bloom", "RoBERTa", "GPT-Neo"),
)


# Costly, or like others of every run.
TRAINED_THOROUGHLY = (
    *("ALBERT", "TransformerEncoder", "Mixtral", "hooks collect outputs", "transposes between blocks"),
    *("deep supervision", "no_grad comes first"),
)


@pytest.mark.parametrize(
    "name",
    in_every_run(
        ZOO,
        [name for name in ZOO if name not in (*TRAINED_ELSEWHERE, *TRAINED_THOROUGHLY)],
        in_thorough=TRAINED_THOROUGHLY,
    ),
)
def test_every_model_trains_over_two_stages(name):
    """Each schedule has 4 microbatches of some models, and 6 of others."""
    number = list(ZOO).index(name)
    kind = ("auto", *SCHEDULES)[number % 6]
    microbatches = 4 + 2 * (number // 6 % 2)
    check(ZOO[name], {kind: case(SCHEDULES.get(kind), microbatches=microbatches, iterations=UNEVEN)})


def test_costs_may_be_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    measured = case({"profile": "measured"})
    check(ZOO["MLP"], {"measured": measured, "from the cache": measured})


@pytest.mark.thorough
def test_every_schedule_runs_four_stages():
    check(ZOO["two towers"], {kind: case(SCHEDULES[kind]) for kind in SCHEDULES}, num_ranks=4)


def with_hidden_states(model: nn.Module, batch: Any) -> Tensor:
    """A loss on what every block returned, which transformers gathers with hooks."""
    answer = model(**batch, output_hidden_states=True)
    return answer.loss + torch.stack([hidden.square().mean() for hidden in answer.hidden_states]).sum()


@pytest.mark.thorough
def test_what_the_model_recomputes_itself_is_recomputed_once():
    full = {"activation_checkpointing": "full"}
    check(ZOO["recomputes"], {kind: case({**SCHEDULES[kind], **full}) for kind in KINDS})


@pytest.mark.thorough
def test_an_evaluation_that_comes_first_plans_for_what_is_recomputed_in_training():
    """It planned cuts inside of what is recomputed as one, and the first step of training was refused."""
    first = case(SCHEDULES["gpipe"], iterations=(EVALUATION, Iteration()))
    check(ZOO["recomputes"], {"gpipe": first}, num_ranks=4)


@pytest.mark.thorough
def test_hidden_states_of_every_layer():
    check(replace(ZOO["GPT-2"], loss=with_hidden_states), {"zb_v": case(SCHEDULES["zb_v"])})


@pytest.mark.parametrize(
    ("name", "kinds"),
    [thorough("tied embeddings", ("interleaved_1f1b", "zb_v")), ("ResNet", ("zb_h1",))],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_replicas_average_their_gradients(name, kinds):
    config = {"pipeline_parallel_degree": 2}
    cases = {kind: case({**SCHEDULES[kind], **config}, iterations=UNEVEN) for kind in kinds}
    check(ZOO[name], cases, num_ranks=4)


@pytest.mark.parametrize("name", ["GPT-NeoX", "ResNet"])
def test_replicas_without_stages_average_their_gradients(name):
    # GPT-NeoX computes its loss in float32, and replicas weigh the first by a number of labels.
    tolerance = 1e-6 if name == "GPT-NeoX" else None
    check(ZOO[name], {"two replicas": case({"pipeline_parallel_degree": 1}, tolerance=tolerance)})


@pytest.mark.parametrize("name", ["GPT-NeoX", "changes its input", "dropout between blocks"])
def test_one_process_runs_the_same_script(name):
    check(ZOO[name], {"one": case(), "loss.backward()": case(plain_backward=True)}, num_ranks=1)


@pytest.mark.thorough
def test_a_tensor_may_be_changed_after_another_stage_has_read_it():
    def place(model: ChangesWhatAnotherStageReads) -> None:
        sw.set_partition(model.block, 0)
        sw.set_partition(model.shift, 1)

    recipe = Recipe(build=ChangesWhatAnotherStageReads, batch=features, loss=classify, place=place)
    by_hand = {"auto_partition": False, "default_partition": 1}
    check(recipe, {kind: case({**SCHEDULES[kind], **by_hand}) for kind in ("gpipe", "1f1b", "zb_h1")})


def test_units_may_change_the_views_that_they_get():
    """What a view was before is on no way of gradients then, and so it seemed to get none."""
    interleaved = {"interleaved_1f1b": case(SCHEDULES["interleaved_1f1b"])}
    check(Recipe(build=AddsToViews, batch=features, loss=classify), interleaved)


@pytest.mark.thorough
def test_evaluation_reads_the_buffers_that_glue_changed():
    iterations = (Iteration(), EVALUATION, Iteration(batch_size=7))
    check(ZOO["buffers in glue"], {"zb_v": case(SCHEDULES["zb_v"], iterations=iterations)})


REFUSED: dict[type[nn.Module], str] = {
    zoo_modules.ChangesAShape: "unsqueeze_() changes the shape of a tensor in place",
    zoo_modules.ChangesADetachedName: "a tensor is changed in place on another stage",
}


@pytest.mark.parametrize(
    ("build", "kind"),
    some_combinations(
        [
            zoo_modules.ReadsBeforeItChanges,
            zoo_modules.RecomputesAcrossBlocks,
            zoo_modules.TakesAGradient,
            zoo_modules.ClampsAParameter,
        ],
        ["gpipe", "1f1b", "zb_h1"],
    ),
)
def test_the_planner_keeps_together_what_must_share_a_stage(build, kind):
    recipe = Recipe(build=build, batch=features, loss=classify)
    check(recipe, {kind: case(SCHEDULES[kind], iterations=UNEVEN)})


@pytest.mark.thorough
def test_several_groups_share_their_stages_in_every_schedule():
    recipe = Recipe(build=zoo_modules.SharesAStage, batch=features, loss=classify)
    check(recipe, {kind: case(SCHEDULES[kind], iterations=UNEVEN) for kind in SCHEDULES})


PLACED_APART: dict[type[nn.Module], str] = {
    zoo_modules.ReadsBeforeItChanges: "the buffer mean is read on an earlier stage",
    zoo_modules.RecomputesAcrossBlocks: "torch.utils.checkpoint is called on code that is placed on several",
    zoo_modules.ClampsAParameter: "the parameter or buffer shift is changed in place by the step function",
    zoo_modules.TakesAGradient: "torch.autograd.grad() asks for a gradient with respect to a tensor",
}


@pytest.mark.parametrize("build", PLACED_APART)
def test_what_must_share_a_stage_cannot_be_placed_apart_by_hand(build):
    def place(model: zoo_modules.Stack) -> None:
        for number, block in enumerate(model.blocks):
            sw.set_partition(block, 0 if number < 3 else 1)

    recipe = Recipe(build=build, batch=features, loss=classify, place=place)
    with pytest.raises(RanksFailedError) as caught:
        check(recipe, {"by hand": case({"auto_partition": False, "default_partition": 1})})
    assert PLACED_APART[build] in str(caught.value)
    assert "zoo_modules.py:" in str(caught.value)


@pytest.mark.parametrize("build", REFUSED)
def test_what_stages_cannot_do_is_refused_before_the_first_step(build):
    recipe = Recipe(build=build, batch=features, loss=classify)
    with pytest.raises(RanksFailedError) as caught:
        check(recipe, {"1f1b": case(SCHEDULES["1f1b"])})
    assert REFUSED[build] in str(caught.value)
    assert "zoo_modules.py:" in str(caught.value)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "kind"),
    [("fills one tensor", "1f1b"), ("ResNet", "zb_v")],
)
def test_evaluation_in_inference_mode(name, kind):
    around, inside = Iteration(train=False, inference="around"), Iteration(train=False, inference="inside")
    check(ZOO[name], {kind: case(SCHEDULES[kind], iterations=(around, Iteration(), inside, around))})


SCRIPTS: dict[str, Case] = {
    "shapes change from step to step": case(iterations=CHANGING),
    "evaluation between steps": case(iterations=(Iteration(), EVALUATION, Iteration(), EVALUATION)),
    "evaluation first": case(iterations=(EVALUATION, Iteration())),
    "evaluation of another size": case(iterations=(Iteration(), SMALL_EVALUATION, Iteration())),
    "loss.backward()": case(plain_backward=True),
    "gradients of two steps": case(
        iterations=(Iteration(update=False), Iteration(zero_grad=False), Iteration(batch_size=6))
    ),
    "optimizer before the model": case(optimizer_first=True),
}


@pytest.mark.parametrize(
    ("script", "name"), some_combinations(list(SCRIPTS), ["ResNet", "parameters in glue", "tied embeddings"])
)
def test_what_scripts_do(script, name):
    check(ZOO[name], {script: SCRIPTS[script]})


def test_autocast_around_the_model_call():
    recipe = replace(ZOO["parameters in glue"], dtype=torch.float32)
    check(recipe, {"bfloat16": case(autocast=torch.bfloat16, tolerance=2e-2)})


@pytest.mark.parametrize(
    ("name", "frozen", "kind"),
    [
        ("returns a dictionary", ("blocks.0", "blocks.1", "blocks.2"), "1f1b"),
        ("MLP", ("0", "2", "4"), "zb_h1"),
    ],
)
def test_the_first_stage_may_be_frozen(name, frozen, kind):
    check(ZOO[name], {kind: case(SCHEDULES[kind], frozen=frozen)})
