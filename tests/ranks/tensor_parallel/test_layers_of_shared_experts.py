"""Ranks that share experts, and layers or sequences at once, train a model as one process does."""

from pathlib import Path

import pytest
from test_listed_experts import losses
from test_shared_experts import case, check
from test_shared_sequences import clip_norm
from transparency import Iteration

from shardwright.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::FutureWarning")


@pytest.mark.thorough
def test_sequences_and_experts_at_once():
    """Two ranks share sequences, two share samples, and all four share experts."""
    settings = {"context_parallel_degree": 2, "activation_checkpointing": "full"}
    uneven = (Iteration(length=6), Iteration(batch_size=7, length=7))
    recomputed = case(2, settings, iterations=uneven, clip=clip_norm)
    check("mixtral", {"recomputed": recomputed}, num_ranks=4)


GRID = {"tensor_parallel_degree": 2, "expert_parallel_degree": 2}
BY_EXPERT = {"expert_parallel_degree": 2}


@pytest.mark.thorough
def test_other_ranks_go_on_from_a_checkpoint_of_both(tmp_path: Path):
    """Of each kind of parameter, all ranks together save each element once."""
    plain = run_ranks(losses, 1, {}, tmp_path / "plain", 6)[0]
    found: list[float] = []
    for num_ranks, settings in [(4, GRID), (2, BY_EXPERT), (4, GRID)]:
        found += run_ranks(losses, num_ranks, settings, tmp_path / "shared", 2)[0]
    assert found == pytest.approx(plain, rel=1e-9)
