"""What a step function returns is the same on every rank."""

import pytest
import torch
from stacks import Stack, start
from torch import nn

from shardwright.testing import RanksFailedError, run_ranks


class Complex(nn.Module):
    """Returns what PyTorch conjugates and negates only when it is read."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        y = self.linear(x)
        z = torch.complex(y, y + 1).conj()
        return {"z": z, "imaginary": z.imag, "first": z[0, 0].imag, "mean": z.abs().mean()}


def test_conjugates_and_negated_numbers():
    """They could not be looked at as bytes."""

    def step_and_compare():
        import shardwright.torch as sw

        sw.init({"run_dir": "off", "microbatches": 2, "profile": "estimated"})
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(3, 3), Complex()).double()
        x = torch.rand(4, 3, dtype=torch.float64)
        expected = [plain(part) for part in x.chunk(2)]
        model = sw.DistributedModel(plain)

        @sw.step
        def train(model, x):
            found = model(x)
            model.backward(found["mean"])
            return found

        found = train(model, x)
        for name in ("z", "imaginary", "first", "mean"):
            for index, wanted in enumerate(expected):
                torch.testing.assert_close(found[name][index], wanted[name].detach())

    run_ranks(step_and_compare, 2)


def first_row_last(x, loss, largest):
    """The same keys in another order, by what is in the batch."""
    return {"largest": largest, "loss": loss} if x[0, 0, 0] > 0 else {"loss": loss, "largest": largest}


def named_by_sign(x, loss, largest):
    return {"positive" if x[0, 0, 0] > 0 else "negative": loss}


def as_many_as_positive(x, loss, largest):
    return [loss, [largest] if x[0, 0, 0] > 0 else []]


def batch_of_signs():
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64).repeat(2)
    return signs.view(8, 1, 1) * torch.linspace(1, 2, 8 * 5 * 8, dtype=torch.float64).view(8, 5, 8)


def outputs_and_expected(results_of):
    sw, plain, model = start(Stack, {})

    @sw.step
    def train(model, x):
        y = model(x)
        loss = y.square().mean()
        model.backward(loss)
        return results_of(x, loss, y.detach().max())

    found = train(model, batch_of_signs())
    expected = [plain(part).detach() for part in batch_of_signs().chunk(4)]
    return found, [y.square().mean() for y in expected], [y.max() for y in expected]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_keys_in_another_order_in_each_microbatch(num_ranks):
    """Results were put together by position: losses of some microbatches beside the largest of others."""
    for found, losses, largest in run_ranks(outputs_and_expected, num_ranks, first_row_last):
        torch.testing.assert_close(found["loss"].outputs, losses)
        torch.testing.assert_close(found["largest"].outputs, largest)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("results_of", "words"),
    [
        (named_by_sign, r"returns result\['negative'\] in microbatch 1 alone and result\['positive'\] in"),
        (as_many_as_positive, r"returns result\[1\]\[0\] in microbatch 0 alone"),
    ],
)
def test_other_keys_in_each_microbatch(num_ranks, results_of, words):
    """All losses came back under the key of the first microbatch."""
    with pytest.raises(RanksFailedError, match=words):
        run_ranks(outputs_and_expected, num_ranks, results_of)
