"""What a step function returns is the same on every rank.

The batch of the first rank reaches the others as it is.
"""

import pytest
import torch
import torch.distributed as dist
from stacks import Stack, start

from shardwright.comm.transport import SmallCollectives
from shardwright.testing import RanksFailedError, run_ranks
from shardwright.torch.batch.batch_broadcast import BatchBroadcast
from shardwright.torch.pytorch.tensors import order_of


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


def batches():
    """Changing shapes, types, plain values and structure."""
    torch.manual_seed(0)
    for size in (3, 3, 3, 1, 0, 4):
        yield (torch.rand(size, 2, dtype=torch.float64), size), {"mask": torch.rand(size, 1) > 0.5}
    yield (torch.tensor(1.5), "text"), {"half": torch.ones(3, dtype=torch.bfloat16), "none": None}
    yield (torch.tensor(2.5), "text"), {"half": torch.zeros(3, dtype=torch.bfloat16), "none": None}
    z = torch.complex(torch.ones(2), torch.ones(2))
    yield (torch.rand(5, 7).t(), z), {}
    yield (z.conj(), z.conj()[0].imag), {"one entry": torch.rand(3, 3)[:1, 0]}
    yield (torch.rand(2, 3, 4, 5, requires_grad=True).to(memory_format=torch.channels_last),), {}
    for alone in (torch.arange(3, dtype=torch.int16), torch.ones(2) > 0, z[:1].conj()):
        yield (alone,), {}


def broadcast_from_first():
    replica = SmallCollectives([0, 1], rank=dist.get_rank())
    return BatchBroadcast(replica, source=0, device=torch.device("cpu"))


def receive_all():
    broadcast = broadcast_from_first()
    given = [((), {})] * len(list(batches())) if dist.get_rank() else list(batches())
    return [broadcast(batch) for batch in given]


def test_every_rank_gets_the_batch_of_the_first():
    expected = list(batches())
    for received in run_ranks(receive_all, 2):
        for (args, kwargs), (wanted_args, wanted_kwargs) in zip(received, expected, strict=True):
            for got, wanted in zip(
                (*args, *kwargs.items()), (*wanted_args, *wanted_kwargs.items()), strict=True
            ):
                if isinstance(wanted, tuple):
                    assert got[0] == wanted[0]
                    got, wanted = got[1], wanted[1]
                if isinstance(wanted, torch.Tensor):
                    assert got.dtype == wanted.dtype
                    assert torch.equal(got, wanted)
                    assert order_of(got) == order_of(wanted)
                else:
                    assert got == wanted
