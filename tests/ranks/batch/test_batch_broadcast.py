"""The batch of the first rank reaches the others as it is."""

import torch
import torch.distributed as dist

from shardwright.comm.transport import SmallCollectives
from shardwright.testing import run_ranks
from shardwright.torch.batch.batch_broadcast import BatchBroadcast
from shardwright.torch.pytorch.tensors import order_of


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
