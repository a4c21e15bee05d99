"""What is read of a loss makes, of the losses of uneven microbatches, that of their batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from shardwright.torch.backward.loss_reduction import form_of_loss
from shardwright.torch.backward.loss_terms import Reduction
from shardwright.torch.backward.loss_walk import LossWalk

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
SIZES = 5, 4, 3
NUM_WHOLE = torch.tensor(72.0)
WEIGHT = nn.Parameter(torch.full((5,), 0.3, dtype=torch.float64))
HEAD = nn.Parameter(torch.ones(60, 5, dtype=torch.float64))
CLASSES = torch.tensor([1.0, 2, 3, 0.5, 1], dtype=torch.float64)


def _flat(z: Tensor) -> Tensor:
    return z.flatten(0, 1)


def _masked(z: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return (F.cross_entropy(_flat(z), y.flatten(), reduction="none") * mask.flatten()).sum() / mask.sum()


def _smooth(z: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    labels = torch.where(mask, y, -100)
    return F.cross_entropy(_flat(z), labels.flatten(), label_smoothing=0.1)


def _clamped(z: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return (z.square().mean(-1) * mask).sum() / mask.sum().clamp(min=1)


def _vae(z: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    bce = F.binary_cross_entropy(z.sigmoid(), torch.full_like(z, 0.3), reduction="sum")
    return bce - 0.5 * torch.sum(1 + z - z.pow(2) - z.exp())


def _weighted_classes(z: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(_flat(z), y.flatten(), weight=CLASSES)


MEANS: dict[str, Loss] = {
    "mse": lambda z, y, mask: F.mse_loss(z, torch.ones_like(z)),
    "l1 + huber": lambda z, y, mask: (
        F.l1_loss(z, torch.ones_like(z)) + 2 * F.huber_loss(z, torch.ones_like(z))
    ),
    "sum / len": lambda z, y, mask: z.square().sum() / len(z),
    "sum / numel": lambda z, y, mask: z.square().sum() / z.numel(),
    "sum over features, mean over samples": lambda z, y, mask: z.square().sum((1, 2)).mean(),
    "mean over samples first": lambda z, y, mask: z.square().mean(0).sum(),
    "batchmean": lambda z, y, mask: F.kl_div(
        _flat(z).log_softmax(-1), _flat(z).detach().softmax(-1), reduction="batchmean"
    ),
    "a penalty of weights": lambda z, y, mask: z.square().mean() + WEIGHT.square().sum() + WEIGHT.norm(),
    "a learned weight of the loss": lambda z, y, mask: z.square().mean() * torch.exp(-WEIGHT[0]) + WEIGHT[0],
    "probabilities for labels": lambda z, y, mask: F.cross_entropy(z[:, 0], z.detach()[:, 1].softmax(1)),
    "bce with logits": lambda z, y, mask: F.binary_cross_entropy_with_logits(z, torch.full_like(z, 0.2)),
    "a stack of means": lambda z, y, mask: torch.stack([z.mean(), z.abs().mean()]).sum() / 2,
    "attention inside": lambda z, y, mask: ((z @ z.transpose(1, 2)).softmax(-1) @ z).square().mean(),
    "a linear layer": lambda z, y, mask: (z @ WEIGHT.expand(5, 5)).square().mean(),
    "a normalised head": lambda z, y, mask: (
        (F.normalize(z[:, 0], dim=-1) @ F.normalize(HEAD).T).square().mean()
    ),
    "a group lasso": lambda z, y, mask: z.square().mean() + HEAD.norm(dim=1).sum(),
    "along the positions": lambda z, y, mask: (z.cumsum(1) * z.flip(1)).square().mean() + z.var(1).mean(),
    "running sums of weights": lambda z, y, mask: (z[:, 0] * HEAD.cumsum(0)[0]).square().mean(),
    "weights reversed": lambda z, y, mask: (z[:, 0] * HEAD.flip(0)[0]).square().mean(),
    "a loss that balances, beside": lambda z, y, mask: z.square().mean() + 0.0 * z.mean(0).square().sum(),
}
SUMS: dict[str, Loss] = {
    "sum": lambda z, y, mask: z.square().sum(),
    "variational autoencoder": _vae,
    "sum / a number of the whole batch": lambda z, y, mask: (
        F.cross_entropy(_flat(z), y.flatten(), reduction="sum") / 73
    ),
    "sum / num_items_in_batch": lambda z, y, mask: z.square().sum() / NUM_WHOLE,
    "a product over the samples": lambda z, y, mask: torch.einsum(
        "b,b->", z.square().mean((1, 2)), z.detach()[:, 0, 0]
    ),
    "einsum over all": lambda z, y, mask: torch.einsum("bti,bti->", z, torch.ones_like(z)),
    "nansum": lambda z, y, mask: z.square().nansum(),
    "dot": lambda z, y, mask: torch.dot(z.flatten(), torch.ones_like(z).flatten()),
    "half of the square": lambda z, y, mask: 0.5 * (z - 1).square().sum(),
}
WEIGHTED: dict[str, Loss] = {
    "ignored labels": lambda z, y, mask: F.cross_entropy(_flat(z), torch.where(mask, y, -100).flatten()),
    "ignored labels, smoothed": _smooth,
    "weights of classes": _weighted_classes,
    "cross entropy of one label": lambda z, y, mask: F.nll_loss(z[:, 0].log_softmax(-1), y[:, 0]),
    "mask": _masked,
    "mask that may be empty": _clamped,
    "picked rows": lambda z, y, mask: F.cross_entropy(z[mask], y[mask]),
    "mean of picked rows": lambda z, y, mask: z[mask].square().mean(),
    "images": lambda z, y, mask: F.cross_entropy(z.transpose(1, 2), torch.where(mask, y, -100)),
    "a mean beside it, equal counts": lambda z, y, mask: _masked(z, y, mask) + _clamped(z, y, mask),
}
NEITHER: dict[str, Loss] = {
    "root of a mean": lambda z, y, mask: F.mse_loss(z, torch.ones_like(z)).sqrt(),
    "focal loss of the mean": lambda z, y, mask: (1 - torch.exp(-z.square().mean())) ** 2 * z.square().mean(),
    "pairs": lambda z, y, mask: F.cross_entropy(z[:, 0] @ z[:, 0].T, torch.arange(len(z))),
    "pairs with the batch": lambda z, y, mask: F.cross_entropy(
        z[:, 0] @ z.detach()[:, 1].T, torch.arange(len(z))
    ),
    "differences of pairs": lambda z, y, mask: (z[:, None, 0] - z[None, :, 0]).square().mean(),
    "distances": lambda z, y, mask: torch.cdist(z[:, 0], z[:, 1]).mean(),
    "distances from means of classes": lambda z, y, mask: F.cross_entropy(
        -torch.cdist(z[:, 0], F.one_hot(y[:, 0], 5).to(z.dtype).T @ z[:, 1]), y[:, 0]
    ),
    "standard deviation": lambda z, y, mask: F.relu(1 - z[:, 0].std(0)).mean(),
    "covariance": lambda z, y, mask: (z[:, 0].T @ z[:, 0]).square().sum(),
    "dice": lambda z, y, mask: 1 - 2 * (z.sigmoid() * 0.5).sum() / (z.sigmoid().sum() + 3),
    "distance": lambda z, y, mask: torch.dist(z, torch.ones_like(z)),
    "largest of the samples": lambda z, y, mask: z.square().mean((1, 2)).topk(len(z)).values.mean(),
    "largest": lambda z, y, mask: z.square().max(),
    "sum and mean": lambda z, y, mask: z.square().sum() + z.abs().mean(),
    "a sum and a regulariser": lambda z, y, mask: z.square().sum() + WEIGHT.square().sum(),
    "centred": lambda z, y, mask: (z.mean(0) - 1).square().sum(),
    "variance of each feature": lambda z, y, mask: z.var(0).mean(),
    "largest of each feature": lambda z, y, mask: z.amax((0, 1)).sum(),
    "norm of each feature": lambda z, y, mask: F.normalize(z, dim=0).square().sum(),
    "running sums": lambda z, y, mask: z.cumsum(0).square().mean(),
    "with the batch reversed": lambda z, y, mask: (z * z.flip(0)).mean(),
}


def _batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(sum(SIZES), 6, 5, generator=g, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(sum(SIZES), 6, generator=g) > 0.4
    return z, torch.randint(0, 5, (sum(SIZES), 6), generator=g), mask


def _form(loss: Tensor, samples: int) -> Any:
    return form_of_loss(
        loss, samples=samples, is_constant=lambda tensor: tensor.data_ptr() == NUM_WHOLE.data_ptr()
    )


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        *(pytest.param(Reduction.MEAN, each, id=f"mean: {name}") for name, each in MEANS.items()),
        *(pytest.param(Reduction.SUM, each, id=f"sum: {name}") for name, each in SUMS.items()),
        *(pytest.param(Reduction.WEIGHTED, each, id=f"weighted: {name}") for name, each in WEIGHTED.items()),
    ],
)
def test_the_loss_of_a_batch_follows_from_those_of_uneven_microbatches(kind: Reduction, loss: Loss) -> None:
    batch = _batch()
    parts = list(zip(*(each.split(SIZES) for each in batch), strict=True))
    total, weights = 0.0, 0.0
    for (z, y, mask), size in zip(parts, SIZES, strict=True):
        found = loss(z.detach().requires_grad_(), y, mask)
        form = _form(found, size)
        assert form.reduction is kind, form
        counts = {round(float(count()), 12) for count in form.counts} or {float(size)}
        assert len(counts) == 1, "terms of one count each"
        weight = 1.0 if kind is Reduction.SUM else counts.pop()
        weights += weight
        total += weight * found.item()
    total = total if kind is Reduction.SUM else total / weights
    assert total == pytest.approx(loss(*batch).item(), rel=1e-12)


@pytest.mark.parametrize("loss", [pytest.param(each, id=name) for name, each in NEITHER.items()])
def test_a_loss_that_is_neither_is_known_with_its_reason(loss: Loss) -> None:
    form = _form(loss(*_batch()), sum(SIZES))
    assert form.reduction is Reduction.NEITHER
    assert form.reason


NOT_KNOWN: dict[str, Loss] = {
    "samples one by one": lambda z, y, mask: torch.stack([each.square().mean() for each in z]).sum(),
}


@pytest.mark.parametrize("loss", [pytest.param(each, id=name) for name, each in NOT_KNOWN.items()])
def test_what_is_not_known_says_so(loss: Loss) -> None:
    form = _form(loss(*_batch()), sum(SIZES))
    assert form.reduction is Reduction.UNKNOWN
    assert form.reason


def test_weights_of_a_deep_model_are_no_samples() -> None:
    """A model of 32 layers, which was followed for 60 nodes, was said to compare samples with one another."""
    layers = [layer for _ in range(40) for layer in (nn.Linear(8, 8), nn.Tanh())]
    x = torch.ones(2, 8)
    assert form_of_loss(F.mse_loss(nn.Sequential(*layers)(x), x), samples=2).reduction is Reduction.MEAN


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: Tensor) -> Tensor:
        return torch.round(weight / scale) * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class _Tokens(nn.Module):
    """Trains some rows of a frozen weight, as PEFT does with tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(2, 16))

    def forward(self, weight: Tensor) -> Tensor:
        return weight.detach().index_copy(0, torch.tensor([1, 2]), self.rows)


class _Quantized(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        scale = weight.detach().abs().mean()
        made: Tensor = _Rounded.apply(weight, scale)
        return made


COMPUTED: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "matrix_exp": lambda layer: parametrizations.orthogonal(layer, orthogonal_map="matrix_exp"),
    "cayley": lambda layer: parametrizations.orthogonal(layer, orthogonal_map="cayley"),
    "householder": lambda layer: parametrizations.orthogonal(layer, orthogonal_map="householder"),
    "quantized": lambda layer: parametrize.register_parametrization(layer, "weight", _Quantized()),
    "tokens": lambda layer: parametrize.register_parametrization(layer, "weight", _Tokens()),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_a_weight_that_is_computed_is_no_batch(name: str) -> None:
    """A head with a normed weight was said to compare samples, where its rows are a multiple of them."""
    first, head = nn.Linear(16, 16), COMPUTED[name](nn.Linear(16, 16))
    own = {buffer.untyped_storage().data_ptr() for buffer in head.buffers()}
    x, labels = torch.randn(4, 4, 16), torch.arange(16)
    for rows in (x, first(x)):
        loss = F.cross_entropy(head(rows).flatten(0, 1), labels)
        form = form_of_loss(loss, samples=4, is_fixed=lambda each: each.untyped_storage().data_ptr() in own)
        assert form.reduction is Reduction.WEIGHTED, form.reason


def test_what_parameters_make_of_samples_is_no_weight() -> None:
    """Samples that have no gradient, and rows that they have looked up, are compared with one another."""
    labels, table = torch.arange(16), nn.Embedding(16, 16)
    x, head = torch.randn(16, 16), nn.Linear(16, 16)
    for left, right in ((head(x), head(x)), (head(x).tanh(), x), (table(labels), table(labels.flip(0)))):
        form = form_of_loss(F.cross_entropy(left @ right.T, labels), samples=16)
        assert form.reduction is Reduction.NEITHER


def test_a_mean_times_the_number_of_its_samples_is_pointed_out() -> None:
    z = _batch()[0]
    size = sum(SIZES)
    assert (
        f"the number {size}, by which it multiplies a mean" in _form(z.square().mean() * size, size).of_data
    )
    assert _form(z.square().mean() * (size + 1), size).of_data == ""
    assert _form(z.square().sum() * size, size).of_data == ""


def test_labels_that_are_probabilities_are_no_crash() -> None:
    z = _batch()[0]
    assert _form(F.cross_entropy(z[:, 0], z.detach()[:, 1].softmax(-1)), sum(SIZES)).reduction is not None


def test_operands_of_products_are_looked_for_in_the_first_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a way through the whole model, which each microbatch went."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    products: dict[Any, list[bool]] = {}

    def reduction() -> Reduction:
        return form_of_loss(layers(torch.ones(2, 4)).square().mean(), samples=2, products=products).reduction

    assert reduction() is Reduction.MEAN
    assert list(products.values()) == [[False, True]]
    monkeypatch.setattr(LossWalk, "_is_weight", None)
    assert reduction() is Reduction.MEAN
