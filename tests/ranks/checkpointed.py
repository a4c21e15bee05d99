"""A training script that saves and resumes, for tests of both."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from sharded import QUIET, VOCABULARY, Net, on_hosts, optimizer_of
from torch import Tensor, nn

import shardwright.torch as sw

SAMPLES, GLOBAL_BATCH = 80, 16


class Counted(nn.Module):
    """Counts its calls in an extra state, and keeps a running mean in a buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.note = "new"

    def reset_parameters(self) -> None:
        self.mean.zero_()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().double().mean())
        return x

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


class Dropped(nn.Module):
    """A net with dropout, a buffer that changes and an extra state."""

    def __init__(self, blocks: int = 4, dropout: float = 0.1):
        super().__init__()
        self.net = Net(blocks=blocks)
        self.counted = Counted()
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(VOCABULARY, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.counted(self.net(x))))


class Tokens(torch.utils.data.Dataset[Tensor]):
    """Samples by number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        row = torch.randint(0, VOCABULARY, (6,), generator=generator)
        row[0] = number % VOCABULARY
        return torch.cat([row, torch.tensor([number])])


def training(
    settings: dict[str, Any],
    folder: Path,
    *,
    until: int,
    first: int = 0,
    dtype: torch.dtype = torch.float64,
    optimizer: str = "AdamW",
    dropout: float = 0.1,
    blocks: int = 4,
    every: int = 3,
    stages: int | None = None,
    resumes: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> tuple[list[float], dict[str, Any], list[int]]:
    """Trains from where the folder's newest checkpoint was."""
    on_hosts(32)
    sw.init({**QUIET, **settings})
    assert stages in (None, sw.pp_size())
    torch.manual_seed(first + 1)  # a resumed run does not begin with the generators of the first
    model = sw.DistributedModel(Dropped(blocks, dropout).to(dtype))
    updates = sw.DistributedOptimizer(optimizer_of(optimizer, model))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        updates,
        max_lr=[1e-2, 2e-2],
        total_steps=50,
        cycle_momentum=optimizer != "Adafactor",  # it has none
    )
    loader = sw.data_loader(Tokens(), GLOBAL_BATCH, seed=3)
    checkpoints = sw.Checkpoints(
        folder, every=every, state={"scheduler": scheduler, "data": loader}, keep=None, **options
    )
    if first == 0:
        model.module.counted.note = "saved"
        sw.seed_everything(5)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        step = checkpoints.resume(**resumes)
    assert step == first
    assert model.module.counted.note == "saved"

    @sw.step
    def train(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x).flatten(0, 1).double(), y.flatten())
        model.backward(loss)
        return loss

    losses, seen = [], []
    while step < until:
        for batch in loader:
            x, y = batch[:, :5], batch[:, 1:6]
            seen += batch[:, 6].tolist()
            updates.zero_grad()
            loss = train(model, x, y).reduce_mean().detach().clone()
            updates.step()
            scheduler.step()
            step += 1
            checkpoints.step_done(step)
            if sw.dp_size() > 1:
                torch.distributed.all_reduce(loss)
                loss /= sw.size()
            losses.append(loss.item())
            if step == until:
                break
    checkpoints.wait()
    return losses, model.state_dict(), seen
