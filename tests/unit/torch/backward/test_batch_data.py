"""A loss that is computed with a statistic of the batch's data is found, and nothing else is."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.torch.backward.batch_data import WatchedData
from shardwright.torch.interception.step_code import ReadingStep

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
SAMPLES = 4
CLASSES = nn.Parameter(torch.ones(8))


def _worst(z: Tensor, w: Tensor, mask: Tensor) -> Tensor:
    losses = z.square().mean(2).flatten()
    return losses[losses > losses.mean().detach()].mean()


OF_DATA: dict[str, Loss] = {
    "normalised advantages": lambda z, w, mask: (z[:, 0, 0] * (w - w.mean()) / (w.std() + 1e-8)).mean(),
    "weights over their sum": lambda z, w, mask: (z.mean((1, 2)) * (w / w.sum())).sum(),
    "weights over their mean": lambda z, w, mask: (z.mean((1, 2)) * w / w.mean()).mean(),
    "softmax of weights": lambda z, w, mask: (z.mean((1, 2)) * torch.softmax(w, 0)).sum(),
    "standardised targets": lambda z, w, mask: F.mse_loss(z[:, 0, 0], (w - w.mean(dim=0)) / w.var(0).sqrt()),
    "over the largest": lambda z, w, mask: (z / w.max()).square().mean(),
    "over its own mean": lambda z, w, mask: (z.square() / z.square().mean().detach()).mean(),
    "samples above the mean": _worst,
    "losses over the number of labels": lambda z, w, mask: (z.mean(2) * mask / mask.sum()).sum(),
    "weights by the classes there are": lambda z, w, mask: F.cross_entropy(
        z[:, 0], mask[:, 0].long(), weight=1 / torch.bincount(mask[:, 0].long(), minlength=5).clamp(min=1)
    ),
    "logits by the classes there are": lambda z, w, mask: (
        (z.flatten(0, 1) + torch.bincount(mask.flatten().long(), minlength=5).clamp(min=1).log())
        .logsumexp(1)
        .mean()
    ),
}


def _mixed_up(z: Tensor, w: Tensor, mask: Tensor) -> Tensor:
    order = torch.randperm(len(w)).to(w.device)
    return (z.mean((1, 2)) * (0.3 * w + 0.7 * w[order])).mean()


ORDERS: dict[str, Loss] = {
    "mixed samples": _mixed_up,
    "mixed with the last ones": lambda z, w, mask: (z[:, 0, 0] - 0.5 * (w + w.flip(0))).square().mean(),
    "the next one": lambda z, w, mask: (z * z.roll(1, 0)).mean(),
    "the next one, by its number": lambda z, w, mask: (z * z[torch.arange(len(z)).roll(1)]).mean(),
    "drawn ones": lambda z, w, mask: (z * z.index_select(0, torch.randint(len(z), (len(z),)))).mean(),
    "drawn by NumPy": lambda z, w, mask: (z[:, 0, 0] * w[np.array([2, 0, 3, 1])]).mean(),
    "drawn by Python": lambda z, w, mask: (z[:, 0, 0] * w[[2, 0, 3, 1]]).mean(),
}
OTHERS: dict[str, Loss] = {
    "a masked mean": lambda z, w, mask: (z.square().mean(2) * mask).sum() / mask.sum().clamp(min=1),
    "sums of features over a count": lambda z, w, mask: (z.mean(2).sum(0) / mask.sum(0)).mean(),
    "a count of clamped labels": lambda z, w, mask: (
        (z.mean(2) * mask).sum() / (mask.sum() + 1e-6).clamp(min=1)
    ),
    "a mean by weights": lambda z, w, mask: (z.mean((1, 2)) * w).sum() / w.sum(),
    "means of samples": lambda z, w, mask: ((z.mean(2) * mask).sum(1) / mask.sum(1)).mean(),
    "targets of samples": lambda z, w, mask: (z.mean((1, 2)) - mask.mean(1)).square().mean(),
    "distributions": lambda z, w, mask: (z.log_softmax(2) * mask.softmax(1)[..., None]).mean(),
    "weights of classes": lambda z, w, mask: (z * (CLASSES.detach()[:5] / CLASSES.detach().mean())).mean(),
    "an accuracy beside": lambda z, w, mask: z.square().mean() + 0 * (z.argmax(2) == 1).float().mean().item(),
    "numbers": lambda z, w, mask: (z * 2.0 - mask.mul(0.5)[..., None]).norm(2.0, 2).mean() + z.std(2).mean(),
    "sorted samples": lambda z, w, mask: (z[w.argsort()].mean((1, 2)) * w.sort()[0]).mean(),
    "features in another order": lambda z, w, mask: (z[:, :, torch.randperm(5)] * z.flip(2)).mean(),
    "numbers of the samples": lambda z, w, mask: z[torch.arange(len(z)), 0, mask[:, 0].long()].mean(),
    "a loss told": lambda z, w, mask: [z.mean(), z.mean().detach() / w.mean()][0],
}


def _found(loss: Loss) -> str:
    torch.manual_seed(0)
    z = torch.randn(SAMPLES, 3, 5, requires_grad=True)
    w, mask = torch.rand(SAMPLES), (torch.rand(SAMPLES, 3) > 0.3).float()
    watched = WatchedData(SAMPLES)
    with watched:
        ReadingStep(loss)(z, w, mask)
    return watched.data.found


@pytest.mark.parametrize("loss", [pytest.param(each, id=name) for name, each in OF_DATA.items()])
def test_a_statistic_of_the_data_is_found_with_its_line(loss: Loss) -> None:
    assert "over the samples of its data (" in _found(loss)
    assert "test_batch_data.py" in _found(loss)


@pytest.mark.parametrize("loss", [pytest.param(each, id=name) for name, each in ORDERS.items()])
def test_another_order_of_the_samples_is_found_with_its_line(loss: Loss) -> None:
    """Each microbatch paired its own samples, without a word."""
    assert "another order of its samples (" in _found(loss)
    assert "test_batch_data.py" in _found(loss)


@pytest.mark.parametrize("loss", [pytest.param(each, id=name) for name, each in OTHERS.items()])
def test_what_follows_from_the_microbatches_is_not(loss: Loss) -> None:
    assert _found(loss) == ""
