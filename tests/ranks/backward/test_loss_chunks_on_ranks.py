"""``loss_chunks``: a head and its loss in pieces train as a plain loop does, on ranks that share a model."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transparency import Case, Iteration, Recipe, differences_by_case
from zoo_modules import Block

from shardwright.config import Config
from shardwright.errors import ConfigError
from shardwright.testing import run_ranks
from shardwright.torch.backward import pending_losses

WORDS, WIDTH = 1024, 16


class Words(nn.Module):
    """A language model whose head may be tied, and which stays divided with tensor degrees."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def ids(batch_size: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(0, WORDS, (batch_size, length))
    return {"ids": ids, "labels": ids.roll(-1, 1)}


def next_word(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["ids"])
    return F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), batch["labels"][:, :-1].reshape(-1))


def next_word_alone(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A loss for each word, of which the script makes its mean."""
    logits = model(batch["ids"]).transpose(1, 2)
    return F.cross_entropy(logits, batch["labels"], reduction="none").mean()


def case(**settings: Any) -> Case:
    config = {"microbatches": 2, "profile": "estimated", "loss_chunks": 3, **settings}
    return Case(config=config, iterations=[Iteration(), Iteration(train=False), Iteration()])


CASES = {
    "stages": case(),
    "split backward": case(pipeline="zb_h1"),
    "no replay": case(replay="off"),
    "recomputation": case(activation_checkpointing="full"),
    "replicas": case(data_parallel_degree=2),
    "shards": case(sharded_data_parallel_degree=2, sdp_param_persistence_threshold=1),
    "shards in turns": case(
        sharded_data_parallel_degree=2,
        sdp_param_persistence_threshold=1,
        sdp_max_live_parameters=WORDS * WIDTH,
    ),
    "tensor": case(tensor_parallel_degree=2),
}


def found_in_pieces(tied: bool) -> tuple[dict[str, list[str]], int]:
    """What differs, and how often a loss was computed in pieces."""
    pieces: list[bool] = []
    reduced = pending_losses.Logits.reduced

    def counted(self: Any, *args: Any, **options: Any) -> Tensor:
        pieces.append(options["sums"])
        return reduced(self, *args, **options)

    pending_losses.Logits.reduced = counted  # type: ignore[method-assign]
    loss = next_word_alone if tied else next_word
    recipe = Recipe(build=lambda: Words(tied), batch=ids, loss=loss)
    return differences_by_case(recipe, CASES), len(pieces)


@pytest.mark.parametrize("tied", [False, True])
def test_a_loss_in_pieces_trains_as_whole_logits_do(tied: bool) -> None:
    first, last = run_ranks(found_in_pieces, 2, tied)
    assert first[0] == last[0] == {}
    of_a_case = 3 * 2  # batches, of two microbatches
    assert first[1] >= 4 * of_a_case  # replicas, shards and tensor ranks: all have a head
    assert last[1] >= first[1] + 4 * of_a_case


@pytest.mark.parametrize("wrong", [0, -1, "many", 1.5, 10**9])
def test_pieces_that_cannot_be(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="loss_chunks"):
        Config.merge({"loss_chunks": wrong})


def test_off_in_yaml() -> None:
    assert Config.merge({"loss_chunks": False}).loss_chunks == "off"
    assert Config.merge({"loss_chunks": 4}).loss_chunks == 4
