"""A split backward gives the gradients of a whole one, and the weights' when they are asked for.

A loss that is computed with a statistic of the batch's data is found, and nothing else is.
"""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.torch.backward.batch_data import WatchedData
from shardwright.torch.backward.split_backward import put_off_weights, split_modules, unsplit
from shardwright.torch.interception.step_code import ReadingStep

SPLIT = {
    "linear": (nn.Linear(6, 5), (3, 6)),
    "linear without bias": (nn.Linear(6, 5, bias=False), (2, 3, 6)),
    "one dimension": (nn.Conv1d(4, 6, 3, padding=1), (2, 4, 9)),
    "two dimensions": (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0)), (2, 4, 9, 8)),
    "groups without bias": (nn.Conv2d(4, 8, 3, groups=2, dilation=2, bias=False), (2, 4, 9, 9)),
    "three dimensions": (nn.Conv3d(2, 3, 2), (2, 2, 4, 5, 6)),
}
WHOLE = {
    "padding by name": (nn.Conv2d(4, 6, 3, padding="same"), (2, 4, 8, 8)),
    "reflected edges": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (2, 4, 8, 8)),
    "no batch dimension": (nn.Conv2d(4, 6, 3), (4, 8, 8)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3), (2, 4, 8, 8)),
}


def gradients(module, x):
    return [x.grad, *(parameter.grad for parameter in module.parameters())]


def backward_twice(module, x, run):
    """Two microbatches, so that gradients are added up."""
    for scale in (1.0, 0.5):
        run((module(x * scale) ** 2).sum())


@pytest.mark.parametrize("name", [*SPLIT, *WHOLE])
def test_gradients_are_those_of_the_plain_module(name):
    torch.manual_seed(0)
    module, shape = {**SPLIT, **WHOLE}[name]
    plain = copy.deepcopy(module).double()
    split = copy.deepcopy(plain)
    split_modules(split)
    x, y = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    y.copy_(x)
    put_off = []

    def run_split(loss):
        with put_off_weights([loss.grad_fn]) as work:
            loss.backward()
        put_off.extend(work)

    backward_twice(plain, x.requires_grad_(), lambda loss: loss.backward())
    backward_twice(split, y.requires_grad_(), run_split)
    assert len(put_off) == (2 if name in SPLIT else 0)
    if name in SPLIT:
        assert all(parameter.grad is None for parameter in split.parameters())
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-12, atol=1e-12)
    for work in put_off:
        work()
    for found, expected in zip(gradients(split, y), gradients(plain, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_linear_layer_is_split_under_autocast(dtype):
    """Zero-bubble schedules were planned with work for later, and there was none."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 4, bias=False))
    split = copy.deepcopy(plain)
    split_modules(split)
    x = torch.randn(3, 6, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", dtype):
        whole, loss = ((module(given).float() ** 2).sum() for module, given in ((plain, x), (split, y)))
    whole.backward()
    with put_off_weights([loss.grad_fn]) as put_off:
        loss.backward()
    assert torch.equal(loss, whole)
    assert len(put_off) == 2
    assert split[0].weight.grad is None
    for work in put_off:
        work()
    for found, expected in zip(gradients(split, y), gradients(plain, x), strict=True):
        assert found.dtype is torch.float32
        assert torch.equal(found, expected)


def test_a_gradient_of_a_gradient_of_a_cast_is_refused():
    """It would leave out the way through the cast."""
    module = nn.Linear(6, 5)
    split_modules(module)
    x = torch.randn(3, 6, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = module(x).float().square().sum()
    with pytest.raises(UsageError, match=r"a gradient of a gradient .* set pipeline to 1f1b"):
        torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("name", SPLIT)
def test_a_whole_backward_and_a_gradient_of_a_gradient_are_those_of_the_plain_module(name):
    torch.manual_seed(0)
    module, shape = SPLIT[name]
    plain = copy.deepcopy(module).double()
    split = copy.deepcopy(plain)
    split_modules(split)
    x = torch.randn(shape, dtype=torch.float64)
    for one in (plain, split):
        given = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(one(given).tanh().sum(), given, create_graph=True)
        (slope.square().sum() + one(given).sum()).backward()
    for found, expected in zip(split.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SPLIT)
def test_frozen_parts_get_no_gradient(name):
    module, shape = SPLIT[name]
    module = copy.deepcopy(module)
    split_modules(module)
    module.weight.requires_grad_(False)
    x = torch.randn(shape)
    loss = module(x.requires_grad_()).sum()
    with put_off_weights([loss.grad_fn]) as work:
        loss.backward()
    for item in work:
        item()
    assert module.weight.grad is None
    assert module.bias is None or module.bias.grad is not None


def test_a_module_is_given_back_as_it_was():
    module = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Linear(1, 1), nn.ReLU())
    split = split_modules(module)
    assert len(split) == 2
    unsplit(split)
    assert not any("forward" in sub.__dict__ for sub in module.modules())


@pytest.mark.parametrize("of_weight", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("of_input", [torch.contiguous_format, torch.channels_last])
def test_a_gradient_lies_in_memory_as_its_weight_does(of_weight, of_input):
    module = nn.Conv2d(4, 6, 3).to(memory_format=of_weight)
    split_modules(module)
    x = torch.randn(2, 4, 9, 8).to(memory_format=of_input)
    loss = module(x).square().sum()
    with put_off_weights([loss.grad_fn]) as put_off:
        loss.backward()
    for work in put_off:
        work()
    assert module.weight.grad.stride() == module.weight.stride()


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
    assert "test_split_backward.py" in _found(loss)


@pytest.mark.parametrize("loss", [pytest.param(each, id=name) for name, each in ORDERS.items()])
def test_another_order_of_the_samples_is_found_with_its_line(loss: Loss) -> None:
    """Each microbatch paired its own samples, without a word."""
    assert "another order of its samples (" in _found(loss)
    assert "test_split_backward.py" in _found(loss)


@pytest.mark.parametrize("loss", [pytest.param(each, id=name) for name, each in OTHERS.items()])
def test_what_follows_from_the_microbatches_is_not(loss: Loss) -> None:
    assert _found(loss) == ""
