"""What a step function returns is the same on every rank."""

import pytest
import torch
from stacks import Stack, start

from shardwright.testing import RanksFailedError, run_ranks


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
