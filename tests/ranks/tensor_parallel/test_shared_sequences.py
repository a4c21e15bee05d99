"""Ranks that share the sequences of a batch train a model as one process does."""

import re
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from language_models import MODELS, WORDS, all_in_64_bits
from test_shared_layers import RECOMPUTED, SCHEDULES, adamw, check, language
from torch import Tensor, nn
from transparency import Case, Iteration, Recipe, differences_by_case

import shardwright.torch as sw
from choices import thorough
from shardwright.testing import RanksFailedError, run_ranks
from shardwright.torch.tensor_parallel.rules import ring_attention

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::FutureWarning")


def case(context: int, settings: Mapping[str, Any] | None = None, **more: Any) -> Case:
    config = {"context_parallel_degree": context, "microbatches": 2, "profile": "estimated"}
    given = {"iterations": (Iteration(),) * 3, "optimizer": adamw, **more}
    return Case(config={**config, **(settings or {})}, **given)


def test_ranks_share_sequences():
    cases = {"three steps": case(3, iterations=(Iteration(length=11),) * 3)}
    check(language(tied=True, dropout=0.1), cases, num_ranks=3)


@pytest.mark.thorough
def test_stages_of_shared_sequences():
    check(language(dropout=0.1), {"": case(2, {"microbatches": 4, **SCHEDULES["zb_v"]})}, num_ranks=4)


def clip_norm(model: Any) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


@pytest.mark.thorough
def test_replicas_and_shards_of_shared_sequences():
    shards = {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 2}
    settings = {**shards, "sdp_param_persistence_threshold": 20}
    check(language(), {"shards": case(2, settings, clip=clip_norm)}, num_ranks=4)


BOTH = {"context_parallel_degree": 1, "tensor_parallel_degree": 2, "sequence_parallel": True}


def test_ranks_share_layers_and_sequences():
    steps = case(2, BOTH, iterations=(Iteration(length=11),) * 3)
    check(language(dropout=0.1), {"three steps": steps}, num_ranks=2)


def of_hugging_face(name: str) -> Recipe:
    import transformers

    kind, config, sizes = MODELS[name]

    def build() -> nn.Module:
        made = getattr(transformers, config)(**{"bos_token_id": 1, "eos_token_id": 2, **sizes})
        made.use_cache = False
        return getattr(transformers, kind)(made)

    def batch(batch_size: int, length: int) -> dict[str, Tensor]:
        ids = torch.randint(3, WORDS, (batch_size, length))
        found = {"input_ids": ids, "labels": ids.clone()}
        if name == "bert":
            found["attention_mask"] = (
                torch.arange(length) < length - torch.arange(batch_size)[:, None] % 4
            ).long()
        return found

    return Recipe(build=build, batch=batch, loss=lambda model, batch: model(**batch).loss)


def differences_in_64_bits(name: str, cases: Mapping[str, Case]) -> dict[str, list[str]]:
    with all_in_64_bits():
        return differences_by_case(of_hugging_face(name), cases)


def check_model(name: str, cases: Mapping[str, Case], *, num_ranks: int) -> None:
    env = {"TRANSFORMERS_VERBOSITY": "error"}
    found = run_ranks(differences_in_64_bits, num_ranks, name, cases, timeout_s=200, env=env)
    assert found == [{}] * num_ranks


def differences_in_a_ring(cases: Mapping[str, Case]) -> tuple[dict[str, list[str]], int]:
    """What differs where all sequences count as long, and how often keys went around in a forward."""
    kind, config, sizes = MODELS["llama"]
    one_head = {**sizes, "num_attention_heads": 1, "num_key_value_heads": 1}
    forward = mock.Mock(wraps=ring_attention._forward)
    with (
        mock.patch.object(ring_attention, "LONG_BYTES", 0),
        mock.patch.object(ring_attention, "_forward", forward),
        mock.patch.dict(MODELS, {"llama with one head": (kind, config, one_head)}),
    ):
        return differences_in_64_bits("llama with one head", cases), forward.call_count


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [{}, thorough(RECOMPUTED)], ids=["ring", "recomputed"])
def test_long_sequences_go_around_in_a_ring(settings):
    """Ranks cannot share its head, and need not gather its keys and values."""
    cases = {"ring": case(3, settings, iterations=(Iteration(length=11),) * 2)}
    found = run_ranks(differences_in_a_ring, 3, cases, timeout_s=200)
    assert [differences for differences, _ in found] == [{}] * 3
    assert all(count >= 2 * 2 * 2 for _, count in found)  # steps, microbatches, layers


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", thorough("bert")])
def test_models_of_hugging_face(name):
    uneven = Iteration(length=11, batch_size=5)
    cases = {"three steps": case(2, iterations=(uneven,) * 3)}
    if name != "llama":
        layers = {**BOTH, "tensor_parallel_degree": 2}
        cases["layers, too"] = case(2, layers, iterations=(uneven,))
    check_model(name, cases, num_ranks=2)


class OfImages(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))


def test_a_model_without_sequences_is_refused():
    def train() -> None:
        sw.init({"context_parallel_degree": 2, "run_dir": "off", "profile": "estimated"})
        model = sw.DistributedModel(OfImages())

        @sw.step
        def step(model: nn.Module, images: Tensor) -> Tensor:
            loss = model(images).square().mean()
            model.backward(loss)
            return loss

        step(model, torch.zeros(4, 3, 9, 9))

    message = (
        "context_parallel_degree is 2, but ranks cannot share sequences along dimension 1: it has 3 entries"
    )
    with pytest.raises(RanksFailedError, match=re.escape(message)):
        run_ranks(train, 2)
