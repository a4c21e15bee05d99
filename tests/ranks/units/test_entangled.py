"""Modules that cannot be split, and operations between units that need data, over two stages."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from transparency import Case, Recipe, differences_by_case
from zoo import classify, features, padded
from zoo_modules import CLASSES, WIDTH, Block, Stack

from shardwright.testing import RanksFailedError, run_ranks

CONFIG = {"microbatches": 4, "profile": "estimated"}


def check(recipe: Recipe, kinds: tuple[str, ...] = ("1f1b", "zb_v")) -> None:
    cases = {kind: Case(config={**CONFIG, "pipeline": kind}) for kind in kinds}
    assert run_ranks(differences_by_case, 2, recipe, cases) == [{}, {}]


class Cell(nn.Module):
    """Adds what it remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) + (0.0 if self.state is None else self.state)
        self.state = y.mean(1, keepdim=True)
        return y


class RememberingLayers(nn.Module):
    """Makes its cell forget, as RecurrentGemma does, long before it calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.cell = nn.ModuleList(Block() for _ in range(6)), Cell()

    def forward(self, x: Tensor) -> Tensor:
        self.cell.state = None
        for layer in self.layers:
            x = layer(x)
        return x + self.cell(x)


class Surrounded(nn.Module):
    """The module that cannot be split is most of the model: a plan would cut it if it could."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = Block(), middle, Block()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.middle(self.first(x))))


class _Reversible(torch.autograd.Function):
    """Keeps only the result, and computes the inputs of every block anew in the backward."""

    @staticmethod
    def forward(ctx, x, blocks):
        left, right = x.chunk(2, dim=-1)
        with torch.no_grad():
            for block in blocks:
                left, right = right, left + block(right)
        ctx.blocks = blocks
        ctx.save_for_backward(left.detach(), right.detach())
        return torch.cat([left, right], dim=-1)

    @staticmethod
    def backward(ctx, gradient):
        left, right = ctx.saved_tensors
        grad_left, grad_right = gradient.chunk(2, dim=-1)
        for block in reversed(ctx.blocks):
            before = left.detach().requires_grad_()
            with torch.enable_grad():
                inner = block(before)
            inner.backward(grad_right)
            left, right = right - inner.detach(), before.detach()
            grad_left, grad_right = grad_right, grad_left + before.grad
        return torch.cat([grad_left, grad_right], dim=-1), None


class ReversibleLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        return sum(_Reversible.apply(torch.cat([x, x], dim=-1), self.layers).chunk(2, dim=-1))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "middle",
    [
        RememberingLayers,
        ReversibleLayers,
    ],
)
def test_modules_that_cannot_be_split_are_kept_whole(middle):
    check(Recipe(build=lambda: Surrounded(middle()), batch=features, loss=classify))


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
