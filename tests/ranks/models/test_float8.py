"""Linear layers in 8 bits, by torchao, emulated on CPUs: a spread model trains as in a plain loop."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transparency import Case, Iteration, Recipe, differences_by_case

from shardwright.testing import run_ranks

WORDS, WIDTH, HEADS = 40, 32, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BSW: Tensor) -> Tensor:
        batch, length, _ = x_BSW.shape
        parts = self.qkv(self.norm_1(x_BSW)).split(WIDTH, dim=-1)
        q, k, v = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSW = x_BSW + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x_BSW + self.down(F.gelu(self.up(self.norm_2(x_BSW))))


def in_8_bits() -> nn.Module:
    """All linear layers but the head."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    blocks = (Block() for _ in range(3))
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS))
    convert_to_float8_training(
        model, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda _, name: "." in name
    )
    return model


def words(batch_size: int, length: int) -> Tensor:
    return torch.randint(0, WORDS, (batch_size, length))


def cross_entropy(model: nn.Module, ids_BS: Tensor) -> Tensor:
    return F.cross_entropy(model(ids_BS[:, :-1]).reshape(-1, WORDS), ids_BS[:, 1:].reshape(-1))


def differences(cases: dict[str, Case]) -> dict[str, list[str]]:
    # Another order of summands, and a value is rounded up that else is rounded down.
    recipe = Recipe(
        build=in_8_bits,
        batch=words,
        loss=cross_entropy,
        dtype=torch.float32,
        tolerance=2e-3,
        loss_tolerance=1e-4,
    )
    return differences_by_case(recipe, cases)


@pytest.mark.filterwarnings("ignore")
def test_products_in_8_bits() -> None:
    pytest.importorskip("torchao")
    ways: dict[str, dict[str, Any]] = {
        "stages, recomputed, with weights' gradients apart": {
            "pipeline": "zb_h1",
            "activation_checkpointing": "full",
        },
        "shards": {
            "pipeline_parallel_degree": 1,
            "sharded_data_parallel_degree": 2,
            "sdp_param_persistence_threshold": 1,
        },
        "parts of layers": {"pipeline_parallel_degree": 1, "tensor_parallel_degree": 2},
    }
    cases = {
        name: Case(
            config={"microbatches": 2, "profile": "estimated", **settings},
            iterations=(Iteration(length=9),) * 2,
            least_divided=0.5 if "parts" in name else 0.0,
        )
        for name, settings in ways.items()
    }
    assert run_ranks(differences, 2, cases, timeout_s=200) == [{}] * 2
