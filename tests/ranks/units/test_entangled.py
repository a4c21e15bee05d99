"""Modules that cannot be split, and operations between units that need data, over two stages.

A unit's output has the shape that the trace says, on whichever stage it is read.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from transparency import Case, Iteration, Recipe, differences_by_case
from zoo import classify, features, padded
from zoo_modules import CLASSES, WIDTH, Stack

from shardwright.testing import RanksFailedError, run_ranks

CONFIG = {"microbatches": 4, "profile": "estimated"}


def check(recipe: Recipe, kinds: tuple[str, ...] = ("1f1b", "zb_v")) -> None:
    cases = {kind: Case(config={**CONFIG, "pipeline": kind}) for kind in kinds}
    assert run_ranks(differences_by_case, 2, recipe, cases) == [{}, {}]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return gradient * y, gradient * x


class Multiplies(Stack):
    """A custom function of what the first and the last block give."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        for block in self.blocks:
            x = block(x)
        return self.head(_Product.apply(first, x))


def test_a_custom_function_may_work_on_tensors_of_two_stages():
    check(Recipe(build=Multiplies, batch=features, loss=classify))


def spoken(batch_size: int, length: int) -> dict[str, Tensor]:
    lengths = torch.randint(1, 4, (batch_size,))
    targets = torch.randint(1, 7, (batch_size, 4)) * (torch.arange(4) < lengths[:, None])
    return {"x": torch.randn(batch_size, length, WIDTH), "targets": targets}


def connectionist(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """As in Hugging Face's Wav2Vec2ForCTC: targets without padding, in one row."""
    scores = model(batch["x"]).log_softmax(-1).transpose(0, 1)
    there = batch["targets"] != 0
    lengths = torch.full((scores.shape[1],), scores.shape[0])
    return F.ctc_loss(scores, batch["targets"].masked_select(there), lengths, there.sum(-1))


@pytest.mark.thorough
def test_a_loss_without_a_fake_kernel_is_computed_between_units():
    check(Recipe(build=Stack, batch=spoken, loss=connectionist))


class PackedLSTM(nn.Module):
    """How many places of a sequence there are follows from values."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        lengths = (~padding).sum(1).cpu()
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1])[0]


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PackedLSTM() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, padding)
        return self.head(x)


def loss_of_tags(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch["padding"]).mT, batch["target"])


def test_modules_that_pack_sequences():
    check(Recipe(build=Tagger, batch=padded, loss=loss_of_tags), ("zb_v",))  # half a second a step: one kind


def test_a_model_that_packs_sequences_between_its_units_is_told_what_to_do():
    recipe = Recipe(build=PackedLSTM, batch=padded, loss=loss_of_tags)
    with pytest.raises(RanksFailedError, match=r"packs sequences .* Move this code and these modules"):
        run_ranks(differences_by_case, 2, recipe, {"": Case()})


class KeepsLarge(nn.Module):
    """How many rows come out depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).flatten(0, 1)
        return y[y[:, 0] > 0]


class ShapeFromValues(Stack):
    """Both the module and its reader are on the last stage: the shape never crosses."""

    def __init__(self) -> None:
        super().__init__()
        self.some = KeepsLarge()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.some(x).square().mean(0)


class CountsOnAnotherStage(ShapeFromValues):
    """The first stage makes rows, and sums them; the last one asks how many there were."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.some(x)
        x = x + rows.sum(0) / 10
        for block in self.blocks:
            x = block(x)
        return x / rows.shape[0]


def squared(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return model(batch["x"]).square().mean()


def run(build: type[nn.Module]) -> list[Any]:
    recipe = Recipe(build=build, batch=features, loss=squared)
    case = Case(config={**CONFIG, "pipeline": "1f1b"}, iterations=(Iteration(), Iteration()))
    return run_ranks(differences_by_case, 2, recipe, {"1f1b": case}, timeout_s=60)


def test_shapes_may_follow_from_values():
    assert run(ShapeFromValues) == [{}] * 2


def test_a_shape_that_other_stages_would_take_from_the_trace_is_refused():
    with pytest.raises(RanksFailedError) as caught:
        run(CountsOnAnotherStage)
    assert "module KeepsLarge gave a tensor of shape" in str(caught.value)
    assert "test_entangled.py:" in str(caught.value)
