"""Ranks that share layers and sequences at once train a model as one process does."""

from test_shared_layers import CHANGING, RECOMPUTED, SCHEDULES, adamw, check, language
from test_shared_sequences import case, check_model, clip_norm
from transparency import Iteration

GRID = {"tensor_parallel_degree": 2}
AGAIN = {**GRID, "sequence_parallel": True}


def test_a():
    cases = {
        "three steps": case(2, GRID, iterations=(Iteration(length=12),) * 3, clip=clip_norm),
    }
    check(language(tied=True, dropout=0.1), cases, num_ranks=4)
