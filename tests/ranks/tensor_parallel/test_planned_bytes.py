"""What a run with ranks that share layers or sequences sends is what its plan says, to the byte.

Ranks that share layers offload their parts of what units keep: exact, and in the memory of the plan.

Every storage is offloaded, however small, so that models of a few kilobytes show it.
"""

import gc
from collections.abc import Mapping
from typing import Any
from unittest import mock
from unittest.mock import patch

import pytest
import torch
from language_models import WORDS
from listed_experts import SparseModel
from searching import model_of
from test_shared_layers import CHANGING, RECOMPUTED, SCHEDULES, Recipe, case, language
from torch import Tensor
from transparency import Case, differences_by_case

import shardwright.torch as sw
from choices import thorough
from shardwright.run.context import context
from shardwright.testing import run_ranks
from shardwright.torch.tensor_parallel.divide import settle_gradients
from shardwright.torch.tensor_parallel.group import ProcessGroupCollectives, TensorGroup, Traffic
from shardwright.torch.tensor_parallel.rules import attention, ring_attention

LAYERS = {"tensor_parallel_degree": 2}
SEQUENCES = {"context_parallel_degree": 2}
EXPERTS = {"expert_parallel_degree": 2}
BOTH = {"tensor_parallel_degree": 2, "sequence_parallel": True}


def sent_and_planned(name, microbatches, settings):
    """Bytes that this rank sends in forwards and backwards of a step, those of the plan, and collectives."""
    sw.init({"run_dir": "off", "microbatches": microbatches, "profile": "estimated", **settings})
    torch.manual_seed(0)
    is_listed = name == "listed"
    made = SparseModel("Mixtral", "DeepSeek", num_experts=4) if is_listed else model_of(name.split(",")[0])
    if "router logits" in name:
        made.config.output_router_logits = True
    model = sw.DistributedModel(made)

    @sw.step
    def train(model, ids):
        loss = model(ids, ids) if is_listed else model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    ids = torch.randint(3, 50 if is_listed else WORDS, (4, 32), generator=torch.Generator().manual_seed(0))
    train(model, ids)
    groups = [each for each in gc.get_objects() if isinstance(each, TensorGroup)]
    groups = [each for each in groups if isinstance(each.collectives, ProcessGroupCollectives)]
    for group in groups:
        group.traffic = Traffic()

    def settled(parameters):
        """What is sent once a step is no part of the forwards and backwards."""
        before = [group.traffic for group in groups]
        for group in groups:
            group.traffic = Traffic()
        settle_gradients(parameters)
        for group, traffic in zip(groups, before, strict=True):
            group.traffic = traffic

    with mock.patch("shardwright.torch.replicas.gradient_buckets.settle_gradients", settled):
        train(model, ids)
    plan = context().plan
    planned = microbatches * sum(stage.exchange_bytes for stage in plan.prediction.stages)
    sent = sum((group.traffic for group in groups), Traffic())
    found = sent.sent_bytes.total(), planned, dict(sent.calls)
    sw.shutdown()
    return found


RUNS = {
    "layers and sequences": [("llama", 2, settings) for settings in (LAYERS, SEQUENCES, BOTH)],
    "experts": [(name, 1, EXPERTS) for name in ("mixtral, router logits", "listed")],
}


@pytest.mark.parametrize("shared", ["layers and sequences", thorough("experts")])
def test_bytes_are_those_of_the_plan(shared):
    def of_each():
        return [sent_and_planned(*run) for run in RUNS[shared]]

    for found in run_ranks(of_each, 2, timeout_s=200):
        for (sent, planned, calls), run in zip(found, RUNS[shared], strict=True):
            assert sent == planned > 0, (run, calls)


def sent_and_planned_in_a_ring():
    with (
        mock.patch.object(ring_attention, "LONG_BYTES", 0),
        # Which way is the cheapest for so small a model hangs on the latency of the day.
        mock.patch.object(attention, "_by_heads", return_value=None),
        mock.patch.object(attention, "_from_own_queries", return_value=None),
        mock.patch.object(ring_attention, "_forward", mock.Mock(wraps=ring_attention._forward)) as forward,
    ):
        return *sent_and_planned("llama with one key head", 1, SEQUENCES), forward.call_count


@pytest.mark.thorough
def test_bytes_of_a_ring_are_those_of_the_plan():
    for sent, planned, calls, in_a_ring in run_ranks(sent_and_planned_in_a_ring, 2, timeout_s=120):
        assert in_a_ring >= 4  # two steps of two layers
        assert sent == planned > 0, calls


OFFLOADS = {"offload_activations": True, "activation_loading_horizon": 1}


def differences_when_offloaded(recipe: Recipe, cases: Mapping[str, Case]) -> tuple[dict[str, list[str]], int]:
    """What differs, and how many storages left."""
    from shardwright.torch.offload.disk import DiskTier

    written = []
    write = DiskTier.write

    def count_write(tier: Any, memory: Tensor) -> Any:
        written.append(memory.nbytes)
        return write(tier, memory)

    with (
        patch("shardwright.torch.offload.offloading.LEAST_BYTES", 1),
        patch.object(DiskTier, "write", count_write),
    ):
        return differences_by_case(recipe, cases), len(written)


def check(recipe: Recipe, cases: Mapping[str, Case], *, num_ranks: int) -> None:
    found = run_ranks(differences_when_offloaded, num_ranks, recipe, cases, timeout_s=200)
    assert [differences for differences, _ in found] == [{}] * num_ranks
    assert all(num_written > 20 for _, num_written in found)


@pytest.mark.thorough
def test_ranks_offload_their_parts() -> None:
    """Three, of which the parts are uneven."""
    cases = {
        "other shapes, evaluations": case(3, OFFLOADS, iterations=CHANGING),
        "inputs": case(3, {**OFFLOADS, **RECOMPUTED}),
    }
    check(language(tied=True, dropout=0.1), cases, num_ranks=3)


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["stages and back", "shards"])
def test_stages_and_shards_of_parts(way: str) -> None:
    ways = {
        "stages and back": SCHEDULES["zb_v"],
        "shards": {
            "pipeline_parallel_degree": 1,
            "sharded_data_parallel_degree": 2,
            "sdp_param_persistence_threshold": 1,
        },
    }
    cases = {way: case(2, {**OFFLOADS, "microbatches": 4, **ways[way]})}
    check(language(tied=True, dropout=0.1), cases, num_ranks=4)
