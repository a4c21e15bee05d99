"""Ranks that share the experts of every layer train a model as one process does."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from language_models import WORDS, all_in_64_bits
from test_shared_layers import LanguageModel, adamw
from torch import Tensor, nn
from transparency import EVALUATION, Case, Iteration, Recipe, differences_by_case

import shardwright.torch as sw
from choices import thorough
from shardwright.testing import RanksFailedError, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::FutureWarning")

_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": WORDS,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
}
_OF_LAYERS = {"moe_intermediate_size": 24, "num_experts": 5, "decoder_sparse_step": 1}
# A loss that balances the routes comes on top.
_BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
EXPERTS = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, **_BALANCED}),
    "qwen2_moe": ("Qwen2Moe", {**_OF_LAYERS, "shared_expert_intermediate_size": 24, **_BALANCED}),
}


def of_hugging_face(name: str, *, experts: str = "eager") -> Recipe:
    import transformers

    kind, sizes = EXPERTS[name]

    def build() -> nn.Module:
        config = getattr(transformers, f"{kind}Config")(**{**_SIZES, **sizes})
        config.use_cache = False
        config._experts_implementation = experts
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        for each in model.parameters():  # experts are made without values
            nn.init.normal_(each, std=0.1)
        return model

    def batch(batch_size: int, length: int) -> dict[str, Tensor]:
        ids = torch.randint(3, WORDS, (batch_size, length))
        return {"input_ids": ids, "labels": ids.clone()}

    return Recipe(build=build, batch=batch, loss=lambda model, batch: model(**batch).loss)


def case(expert: int, settings: Mapping[str, Any] | None = None, **more: Any) -> Case:
    config = {"expert_parallel_degree": expert, "microbatches": 2, "profile": "estimated"}
    given = {"iterations": (Iteration(length=6),) * 3, "optimizer": adamw, "least_divided": 0.25, **more}
    return Case(config={**config, **(settings or {})}, **given)


def differences_in_64_bits(name: str, experts: str, cases: Mapping[str, Case]) -> dict[str, list[str]]:
    with all_in_64_bits():
        return differences_by_case(of_hugging_face(name, experts=experts), cases)


def check(name: str, cases: Mapping[str, Case], *, num_ranks: int, experts: str = "eager") -> None:
    env = {"TRANSFORMERS_VERBOSITY": "error"}
    found = run_ranks(differences_in_64_bits, num_ranks, name, experts, cases, timeout_s=200, env=env)
    assert found == [{}] * num_ranks


@pytest.mark.parametrize("name", ["mixtral", thorough("qwen2_moe")])
def test_ranks_share_experts(name):
    uneven = Iteration(batch_size=7, length=5)
    steps = case(2, iterations=(uneven, uneven, uneven, EVALUATION))
    cases = {"three steps": steps}
    if name == "mixtral":
        cases["layers alone"] = case(1, {"tensor_parallel_degree": 2}, iterations=(uneven, uneven))
    check(name, cases, num_ranks=2)


@pytest.mark.thorough
def test_stages_and_replicas_of_shared_experts():
    stages = {"pipeline_parallel_degree": 2, "pipeline": "1f1b"}
    cases = {
        "stages": case(2, stages, least_divided=0.0),
        "replicas": case(2, {"pipeline_parallel_degree": 1}),
        "shards": case(
            2,
            {
                "pipeline_parallel_degree": 1,
                "sharded_data_parallel_degree": 2,
                "sdp_param_persistence_threshold": 1,
            },
            least_divided=0.0,
        ),
        "shards of optimizer state": case(
            2, {"pipeline_parallel_degree": 1, "shard_optimizer_state": True}, least_divided=0.0
        ),
    }
    check("mixtral", cases, num_ranks=4)


class Normalising(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.BatchNorm1d(2) for _ in range(2))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (LanguageModel, "expert_parallel_degree is 2, but the model has no layer of 2 experts or more"),
        (None, "expert_parallel_degree is 2, but a microbatch has 1 sample, and each rank takes some"),
        (Normalising, "experts cannot be shared: its experts have buffers"),
    ],
)
def test_what_cannot_be_shared_is_refused(model, message):
    def train(make: Any) -> None:
        settings = {"expert_parallel_degree": 2, "microbatches": 2, "run_dir": "off", "profile": "estimated"}
        sw.init(settings)
        model = sw.DistributedModel(of_hugging_face("mixtral").build() if make is None else make())

        @sw.step
        def step(model: nn.Module, ids: Tensor) -> Tensor:
            found = model(ids)
            loss = getattr(found, "logits", found).square().mean()
            model.backward(loss)
            return loss

        step(model, torch.ones(2, 4, dtype=torch.int64))

    with pytest.raises(RanksFailedError, match=re.escape(message)):
        run_ranks(train, 2, model)
