"""Ranks that share layers and sequences at once train a model as one process does."""

from unittest import mock

import pytest
from test_shared_layers import CHANGING, RECOMPUTED, SCHEDULES, check, language
from test_shared_sequences import case, check_model, clip_norm, differences_in_64_bits
from transparency import Iteration

from shardwright.testing import run_ranks
from shardwright.torch.tensor_parallel.rules import attention, ring_attention

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::FutureWarning")

WHOLE = {"tensor_parallel_degree": 2}
CUT_AGAIN = {**WHOLE, "sequence_parallel": True}


UNEVEN = (Iteration(length=11),) * 2


def test_layers_and_sequences_at_once():
    """Two ranks share layers, two share sequences whose lengths are uneven; norms are counted once."""
    cut_again = case(2, CUT_AGAIN, iterations=UNEVEN, clip=clip_norm)
    check(language(tied=True, dropout=0.1), {"cut again between layers": cut_again}, num_ranks=4)


@pytest.mark.thorough
def test_whole_sequences_between_layers_and_offload():
    cases = {
        "whole between layers": case(2, WHOLE, iterations=UNEVEN, clip=clip_norm),
        "offloaded": case(2, {**WHOLE, "offload_activations": True}, iterations=UNEVEN),
    }
    check(language(tied=True, dropout=0.1), cases, num_ranks=4)


@pytest.mark.sweep
def test_other_shapes_and_recomputation():
    cases = {
        str(settings): case(2, {**settings, **RECOMPUTED}, iterations=CHANGING, optimizer_first=True)
        for settings in (WHOLE, CUT_AGAIN)
    }
    check(language(tied=True, dropout=0.1), cases, num_ranks=4)


@pytest.mark.sweep
def test_stages_replicas_and_shards_of_both():
    alone = {**WHOLE, "pipeline_parallel_degree": 1}
    shards = {**alone, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 20}
    cases = {
        "1f1b": case(2, {"microbatches": 4, **CUT_AGAIN, **SCHEDULES["1f1b"]}, clip=clip_norm),
        "zb_v": case(2, {"microbatches": 4, **WHOLE, **SCHEDULES["zb_v"]}),
        "two replicas": case(2, alone, iterations=CHANGING),
        "in another order": case(2, {**alone, "placement_strategy": "TPD"}, clip=clip_norm),
        "shards": case(2, shards, clip=clip_norm),
        "shared updates": case(2, {**alone, "shard_optimizer_state": True}),
    }
    check(language(tied=True, dropout=0.1), cases, num_ranks=8)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_models_of_hugging_face(name):
    uneven = (Iteration(length=11, batch_size=5),)
    cases = {
        "whole between layers": case(2, WHOLE, iterations=uneven),
        "cut again between layers": case(2, CUT_AGAIN, iterations=uneven),
    }
    check_model(name, cases, num_ranks=4)


def differences_by_ways(cases):
    """What differs where keys go around, and where ranks exchange positions for heads; calls of either."""
    forward = mock.Mock(wraps=ring_attention._forward)
    with (
        mock.patch.object(ring_attention, "LONG_BYTES", 0),
        mock.patch.object(attention, "_by_heads", return_value=None),
        mock.patch.object(attention, "_from_own_queries", return_value=None),
        mock.patch.object(ring_attention, "_forward", forward),
    ):
        in_a_ring = differences_in_64_bits("llama", cases)
    with mock.patch.object(attention, "_from_own_queries", return_value=None):
        by_heads = differences_in_64_bits("llama", cases)
    return in_a_ring, by_heads, forward.call_count


@pytest.mark.sweep
def test_every_way_of_attention():
    cases = {"steps": case(2, WHOLE, iterations=(Iteration(length=11),) * 2)}
    found = run_ranks(differences_by_ways, 4, cases, timeout_s=200, env={"TRANSFORMERS_VERBOSITY": "error"})
    assert [each[:2] for each in found] == [({}, {})] * 4
    assert all(count >= 2 * 2 * 2 for *_, count in found)  # steps, microbatches, layers
