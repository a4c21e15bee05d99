"""A model whose layers ranks share trains as in one process: losses, gradients, parameters, buffers."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transparency import EVALUATION, Case, Iteration, Recipe, differences_by_case
from zoo import ZOO

from choices import thorough
from shardwright.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::FutureWarning")

WORDS, WIDTH, HEADS = 50, 24, 4


class Layer(nn.Module):
    """Attention with fused projections, and a feed-forward network."""

    def __init__(self, dropout: float):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.drop.p if self.training else 0.0
        heads = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True, dropout_p=dropout)
        x = x + self.drop(self.out(heads.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class LanguageModel(nn.Module):
    """Layers between an embedding and a head with the same weight, or with another one."""

    def __init__(self, *, layers: int = 2, tied: bool = False, dropout: float = 0.0):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        x = self.words(ids_BT) + self.places(torch.arange(ids_BT.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def language(**options: Any) -> Recipe:
    def batch(batch_size: int, length: int) -> dict[str, Tensor]:
        ids = torch.randint(0, WORDS, (batch_size, length))
        return {"ids_BT": ids, "target": ids.roll(-1, 1)}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["ids_BT"]).flatten(0, 1), batch["target"].flatten())

    return Recipe(build=lambda: LanguageModel(**options), batch=batch, loss=loss)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def case(tensor: int, settings: Mapping[str, Any] | None = None, **more: Any) -> Case:
    config = {"tensor_parallel_degree": tensor, "microbatches": 2, "profile": "estimated", **(settings or {})}
    given = {"iterations": (Iteration(),) * 3, "optimizer": adamw, **more}
    return Case(config=config, **given)


def check(recipe: Recipe, cases: Mapping[str, Case], *, num_ranks: int) -> None:
    env = {"TRANSFORMERS_VERBOSITY": "error"}
    found = run_ranks(differences_by_case, num_ranks, recipe, cases, timeout_s=200, env=env)
    assert found == [{}] * num_ranks


SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"pipeline": "1f1b"},
    "zb_h1": {"pipeline": "zb_h1"},
    "zb_v": {"pipeline": "zb_v"},
}
CHANGING = (
    EVALUATION,
    Iteration(batch_size=8, length=12),
    Iteration(batch_size=5, length=9, update=False),
    Iteration(batch_size=8, length=16, zero_grad=False),
    EVALUATION,
)
RECOMPUTED = {"activation_checkpointing": "full"}


def test_ranks_share_every_layer():
    cases = {
        "other shapes, evaluations, gradients of two steps": case(3, iterations=CHANGING),
        "recomputed": case(3, RECOMPUTED, optimizer_first=True),
    }
    check(language(), cases, num_ranks=3)


@pytest.mark.thorough
def test_tied_weights_and_dropout():
    cases = {"four microbatches": case(2, {"microbatches": 4}), "recomputed": case(2, RECOMPUTED)}
    check(language(tied=True, dropout=0.1), cases, num_ranks=2)


def test_stages_of_shared_layers():
    zb_v = case(2, {"microbatches": 4, **SCHEDULES["zb_v"]})
    check(language(tied=True, dropout=0.1), {"zb_v": zb_v}, num_ranks=4)


@pytest.mark.thorough
def test_recomputed_stages_of_shared_layers():
    """A rank of the pipeline is a group of ranks here: each has its part of the stage."""
    recomputed = case(2, {"microbatches": 4, **SCHEDULES["zb_h1"], **RECOMPUTED}, iterations=CHANGING)
    check(language(tied=True, dropout=0.1), {"recomputed": recomputed}, num_ranks=4)


@pytest.mark.parametrize("more", [{"placement_strategy": "TPD"}, thorough({})], ids=["TPD", "DPT"])
def test_replicas_of_shared_layers(more):
    given = {"pipeline_parallel_degree": 1, **more}
    replicas = case(2, given) if more else case(2, given, iterations=CHANGING)
    check(language(tied=True, dropout=0.1), {"two replicas": replicas}, num_ranks=4)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05)


# Layouts, cells that call kernels of their own, autograd functions, buffers, hooks.
EVERY_RUN = (
    "dropout on channels last",
    "LSTM",
    "custom functions",
    "stateful blocks",
)


@pytest.mark.thorough
@pytest.mark.parametrize("name", EVERY_RUN)
def test_every_model_is_shared_by_two_ranks(name):
    settings = {"microbatches": 4}
    check(ZOO[name], {"": case(2, settings, optimizer=sgd)}, num_ranks=2)
