"""Every plan that the planner can make runs exactly: plans at random, of models at random (`random_plans`).

The one that began it: stages of an mT5 encoder on ranks 0, 1, 0, 1, where each block hands on the position
bias that the first one has computed. Rank 1 got it as a message, handed that on where a stand-in was
expected, and the runtime refused a plan of its own planner ("gets another tensor ... than in the trace").
"""

import pytest
from architectures import ARCHITECTURES
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_plans import Drawn, Shape, differences_of_plans, drawn_plans, recipe_of, shapes
from zoo import ZOO

from shardwright.testing import run_ranks

ANY = st.tuples(shapes(), drawn_plans())
# Encoders with decoders, U-Nets, tied models: of others, beside those that are drawn.
OTHERS = (
    "T5",
    "mT5",
    "BART",
    "Whisper",
    "3-D U-Net",
    "tied embeddings",
    "GPT-2",
    "ALBERT",
    "parameters in glue",
)

at_random = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
ENV = {"TRANSFORMERS_VERBOSITY": "error"}


def check(cases: list[tuple[Shape, Drawn]], *, ranks: int) -> None:
    named = {f"{shape} by {drawn}": (recipe_of(shape), drawn) for shape, drawn in cases}
    assert run_ranks(differences_of_plans, ranks, named, timeout_s=200) == [{}] * ranks


def test_a_tensor_that_layers_hand_on_crosses_to_stages_on_ranks_in_turn() -> None:
    shape = Shape(encoder=3, decoder=3, bias="got", results="tuple", skips="memory")
    check([(shape, Drawn(kind="interleaved_1f1b", stages_per_rank=4, microbatches=2))], ranks=2)


@settings(at_random, max_examples=1)
@given(cases=st.lists(ANY, min_size=8, max_size=8))
def test_plans_of_two_ranks(cases: list[tuple[Shape, Drawn]]) -> None:
    check(cases, ranks=2)


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [2, 3, 4])
@settings(at_random, max_examples=12)
@given(cases=st.lists(ANY, min_size=10, max_size=10))
def test_plans_of_drawn_models(ranks: int, cases: list[tuple[Shape, Drawn]]) -> None:
    check(cases, ranks=ranks)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::FutureWarning")
@pytest.mark.parametrize("name", OTHERS)
@settings(at_random, max_examples=1)
@given(plans=st.lists(drawn_plans(), min_size=12, max_size=12))
def test_plans_of_models_of_others(name: str, plans: list[Drawn]) -> None:
    recipe = ZOO[name] if name in ZOO else ARCHITECTURES[name].recipe()
    cases = {str(drawn): (recipe, drawn) for drawn in plans}
    found = run_ranks(differences_of_plans, 2, cases, length=12, timeout_s=500, env=ENV)
    assert found == [{}] * 2
