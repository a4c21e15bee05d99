"""What a run with ranks that share layers or sequences sends is what its plan says, to the byte."""

import gc
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from language_models import WORDS
from listed_experts import SparseModel
from searching import model_of

import shardwright.torch as sw
from choices import combinations_of, in_every_run, in_sweep, thorough
from shardwright.run.context import context
from shardwright.testing import run_ranks
from shardwright.torch.tensor_parallel.divide import settle_gradients
from shardwright.torch.tensor_parallel.group import ProcessGroupCollectives, TensorGroup, Traffic
from shardwright.torch.tensor_parallel.rules import attention, ring_attention

LAYERS = {"tensor_parallel_degree": 2}
SEQUENCES = {"context_parallel_degree": 2}
EXPERTS = {"expert_parallel_degree": 2}
GRID = {**LAYERS, **SEQUENCES}
BOTH = {"tensor_parallel_degree": 2, "sequence_parallel": True}


def shifted_loss(model, ids):
    """As in a step function of one's own."""
    logits = model(input_ids=ids).logits
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def loss_of(name, model, ids):
    if name == "listed":
        return model(ids, ids)
    return shifted_loss(model, ids) if "shifted" in name else model(input_ids=ids, labels=ids).loss


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
        loss = loss_of(name, model, ids)
        model.backward(loss)
        return loss

    words = 50 if name == "listed" else WORDS
    length = 31 if "odd" in name else 32
    ids = torch.randint(3, words, (4, length), generator=torch.Generator().manual_seed(0))
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


# T5: the gradients of its position biases, and of what its encoder gives, are added up over layers before
# they are placed.
@pytest.mark.parametrize(
    ("name", "microbatches"),
    combinations_of(["llama", "gpt2", "bert", "gpt_neox", "t5"], [1, 2], kept=[("llama", 2)]),
)
def test_bytes_are_those_of_the_plan(name, microbatches):
    for sent, planned, calls in run_ranks(sent_and_planned, 2, name, microbatches, LAYERS, timeout_s=120):
        assert sent == planned > 0, calls


@pytest.mark.parametrize(
    "name", in_every_run(["llama", "llama, shifted", "gpt2", "bert", "gpt_neox"], ["llama"])
)
@pytest.mark.parametrize("settings", [SEQUENCES, BOTH], ids=["sequences", "layers and sequences"])
def test_bytes_of_shared_sequences_are_those_of_the_plan(name, settings):
    for sent, planned, calls in run_ranks(sent_and_planned, 2, name, 2, settings, timeout_s=120):
        assert sent == planned > 0, calls


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {**GRID, **BOTH}),
        thorough("llama, shifted", {**GRID, **BOTH}),
        *(in_sweep(name, settings) for name in ("gpt2", "bert") for settings in (GRID, {**GRID, **BOTH})),
        in_sweep("llama", GRID),
        in_sweep("llama, shifted", GRID),
    ],
)
def test_bytes_of_layers_of_shared_sequences_are_those_of_the_plan(name, settings):
    """The ranks with the last part of a sequence send most, and the plan has what they send."""
    found = run_ranks(sent_and_planned, 4, name, 2, settings, timeout_s=200)
    sent, planned, calls = found[-1]
    assert sent == planned > 0, calls
    assert max(each for each, _, _ in found) == sent


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


@pytest.mark.thorough
@pytest.mark.parametrize("name", [thorough("mixtral, router logits"), "listed"])
def test_bytes_of_shared_experts_are_those_of_the_plan(name):
    for sent, planned, calls in run_ranks(sent_and_planned, 2, name, 1, EXPERTS, timeout_s=120):
        assert sent == planned > 0, calls
