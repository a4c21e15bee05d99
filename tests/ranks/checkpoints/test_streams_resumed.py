"""Streams go on behind the last sample of a checkpoint, also where other ranks resume it."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from choices import in_sweep
from shardwright.testing import RanksFailedError, run_ranks


class Samples(IterableDataset[Tensor]):
    """Each sample has its number; goes on where its state says."""

    def __init__(self, first: int, by: int):
        self.next, self.by = first, by

    def __iter__(self) -> Iterator[Tensor]:
        while self.next < 10_000:
            self.next += self.by
            yield torch.tensor([float(self.next - self.by), 1.0], dtype=torch.float64)

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class OwnLoader:
    """A script's own loader, of batches of its replica, with the state of its stream."""

    def __init__(self, stream: Samples, batch: int):
        self.stream, self.batch = stream, batch

    def __iter__(self) -> Iterator[Tensor]:
        return iter(DataLoader(self.stream, self.batch))

    def state_dict(self) -> dict[str, int]:
        return self.stream.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.stream.load_state_dict(state)


class Stateful(DataLoader[Tensor]):
    """Iterates by itself, as torchdata's loader does."""

    def __iter__(self) -> Any:
        return iter(torch.stack(batch) for batch in batched(self.dataset, self.batch_size or 1))

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def batched(samples: Any, many: int) -> Iterator[list[Tensor]]:
    rest = iter(samples)
    while batch := list(islice(rest, many)):
        yield batch


def streamed(
    settings: dict[str, Any], folder: Path, until: int, kind: str = "one for all"
) -> tuple[list[float], list[list[int]], int]:
    """Losses over all replicas, the samples of this replica in each step, and its number."""
    import shardwright.torch as sw

    sw.init({**QUIET, **settings})
    torch.manual_seed(0)
    layers = [nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)]
    model = sw.DistributedModel(nn.Sequential(*layers).double())
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    loader: Any
    if kind == "one for all":
        loader = sw.data_loader(Samples(0, 1), 8)
    elif kind == "in another order":
        loader = sw.data_loader(Samples(sw.rdp_rank(), 1), 8)
    elif kind == "one for each":
        loader = OwnLoader(Samples(sw.rdp_rank(), sw.rdp_size()), 8 // sw.rdp_size())
    else:
        made = {"DataLoader": DataLoader, "StatefulDataLoader": Stateful}[kind]
        loader = made(Samples(0, 1), 8 // sw.rdp_size())
    checkpoints = sw.Checkpoints(folder, state={} if kind == "DataLoader" else {"data": loader})
    step = checkpoints.resume()

    @sw.step
    def train(model: Any, x: Tensor) -> Tensor:
        loss = model(x / 100).square().mean()
        model.backward(loss)
        return loss

    losses, seen = [], []
    for x in loader:
        optimizer.zero_grad()
        loss = train(model, x).reduce_mean().detach().clone()
        optimizer.step()
        if sw.rdp_size() > 1:
            torch.distributed.all_reduce(loss)
            loss /= sw.size()
        losses.append(loss.item())
        seen.append(x[:, 0].int().tolist())
        step += 1
        if step == until:
            break
    checkpoints.save(step)
    checkpoints.close()
    return losses, seen, sw.rdp_rank()


REPLICAS = {"pipeline_parallel_degree": 1, "microbatches": 1}
STAGES = {"pipeline_parallel_degree": 2, "microbatches": 2}


def _samples(results: list[Any]) -> list[list[int]]:
    """The samples of each step, of all replicas in turn."""
    of_replicas = {replica: seen for _, seen, replica in results}
    assert all(seen == of_replicas[replica] for _, seen, replica in results)
    return [
        [sample for part in step for sample in part]
        for step in zip(*(of_replicas[replica] for replica in sorted(of_replicas)), strict=True)
    ]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((REPLICAS, 2), (STAGES, 2)),
        in_sweep((STAGES, 2), (REPLICAS, 2)),
        in_sweep((REPLICAS, 1), (STAGES, 4)),
        in_sweep((STAGES, 2), (REPLICAS, 4)),
    ],
)
def test_one_stream_goes_on_with_other_degrees(first: Any, then: Any, tmp_path: Path) -> None:
    """Settings and ranks."""
    whole = run_ranks(streamed, 1, REPLICAS, tmp_path / "whole", 5)
    begun = run_ranks(streamed, first[1], first[0], tmp_path / "cut", 2)
    rest = run_ranks(streamed, then[1], then[0], tmp_path / "cut", 5)
    assert (
        _samples(begun) + _samples(rest) == _samples(whole) == [[*range(i, i + 8)] for i in range(0, 40, 8)]
    )
    assert begun[0][0] + rest[0][0] == pytest.approx(whole[0][0], rel=1e-12)


def test_streams_of_replicas_go_on_with_as_many(tmp_path: Path) -> None:
    """Two replicas of one stage each, then of two: each has its own stream, and no other number can."""
    begun = run_ranks(streamed, 2, REPLICAS, tmp_path, 2, "one for each")
    assert _samples(begun) == [[0, 2, 4, 6, 1, 3, 5, 7], [8, 10, 12, 14, 9, 11, 13, 15]]
    rest = run_ranks(streamed, 4, STAGES, tmp_path, 3, "one for each")
    assert _samples(rest) == [[16, 18, 20, 22, 17, 19, 21, 23]]
    says = r"has states that differ by rank \(data\), of 4 ranks with 2 replicas, and this run has 2 with 1"
    with pytest.raises(RanksFailedError, match=says):
        run_ranks(streamed, 2, STAGES, tmp_path, 4, "one for each")


@pytest.mark.parametrize("kind", [in_sweep("DataLoader"), "StatefulDataLoader"])
def test_replicas_that_read_the_same_stream_are_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError, match="all 2 replicas have the same samples in step 1"):
        run_ranks(streamed, 2, REPLICAS, tmp_path, 2, kind)


def test_replicas_that_read_streams_in_other_orders_are_told(tmp_path: Path, capfd: Any) -> None:
    run_ranks(streamed, 2, REPLICAS, tmp_path, 2, "in another order")
    assert capfd.readouterr().err.count("in step 1, rank 1 had read other samples than rank 0") == 1
