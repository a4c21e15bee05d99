"""Ranks that share layers and sequences at once train a model as one process does."""

import pytest
from test_shared_layers import check, language
from test_shared_sequences import case, clip_norm
from transparency import Iteration

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::FutureWarning")

WHOLE = {"tensor_parallel_degree": 2}
CUT_AGAIN = {**WHOLE, "sequence_parallel": True}


UNEVEN = (Iteration(length=11),) * 2


@pytest.mark.thorough
def test_layers_and_sequences_at_once():
    """Two ranks share layers, two share sequences whose lengths are uneven; norms are counted once."""
    cut_again = case(2, CUT_AGAIN, iterations=UNEVEN, clip=clip_norm)
    check(language(tied=True, dropout=0.1), {"cut again between layers": cut_again}, num_ranks=4)
