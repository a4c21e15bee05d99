"""Rows that hold several documents: tokens attend to their own document, however the model is spread.

transformers reads the boundaries from `position_ids`, which begin again with each document.
"""

from typing import Any

import pytest
import torch
from language_models import WORDS, all_in_64_bits
from torch import Tensor, nn
from transparency import Case, Iteration, Recipe, differences_by_case

from choices import thorough
from shardwright.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::FutureWarning")

LENGTH = 12


def llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=WORDS,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def packed(batch_size: int, length: int) -> dict[str, Tensor]:
    """Rows of two documents each, with a boundary of their own."""
    ids = torch.randint(3, WORDS, (batch_size, length))
    ends = torch.randint(1, length, (batch_size, 1))
    places = torch.arange(length)
    positions = torch.where(places < ends, places, places - ends)
    labels = ids.masked_fill(positions == 0, -100)  # the first of a document follows nothing
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def differences(cases: dict[str, Case]) -> dict[str, list[str]]:
    with all_in_64_bits():
        recipe = Recipe(build=llama, batch=packed, loss=lambda model, batch: model(**batch).loss)
        return differences_by_case(recipe, cases)


def test_a_row_of_two_documents_is_as_two_rows():
    torch.manual_seed(0)
    model = llama().double()
    ids = torch.randint(3, WORDS, (1, 12))
    together = model(input_ids=ids, position_ids=torch.tensor([[0, 1, 2, 3, 4, *range(7)]])).logits
    apart = torch.cat([model(input_ids=part).logits for part in (ids[:, :5], ids[:, 5:])], dim=1)
    torch.testing.assert_close(together, apart)


@pytest.mark.parametrize(
    "way", ["stages", thorough("layers"), thorough("sequences"), thorough("stages of sequences")]
)
def test_documents_stay_apart(way: str) -> None:
    ways: dict[str, dict[str, Any]] = {
        "stages": {"pipeline_parallel_degree": 2},
        "layers": {"pipeline_parallel_degree": 1, "tensor_parallel_degree": 2},
        "sequences": {"pipeline_parallel_degree": 1, "context_parallel_degree": 2},
        "stages of sequences": {"pipeline_parallel_degree": 2, "context_parallel_degree": 2},
    }
    config = {"microbatches": 2, "profile": "estimated", **ways[way]}
    num_ranks = 4 if way == "stages of sequences" else 2
    cases = {way: Case(config=config, iterations=(Iteration(length=LENGTH),) * 3)}
    env = {"TRANSFORMERS_VERBOSITY": "error"}
    found = run_ranks(differences, num_ranks, cases, timeout_s=200, env=env)
    assert found == [{}] * num_ranks
