"""A small training script, as tests of saving run it on each rank."""

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp

QUIET = {
    "run_dir": "off",
    "profile": "estimated",
    "timeout_s": 60,
}
WIDTH = 8


class Net(nn.Module):
    """Blocks with parameters, a buffer that forwards change, and a parameter that is not trained."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh())
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.frozen = nn.Linear(width, width)
        self.frozen.weight.requires_grad_(False)
        self.last = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(self.second(self.norm(self.first(x)))))


class Script:
    """A script up to its loop."""

    def __init__(
        self,
        settings: dict[str, Any],
        *,
        kind: str = "AdamW",
        dtype: Any = torch.float64,
        width: int = WIDTH,
        model: nn.Module | None = None,
    ):
        smp.init({**QUIET, "ddp": True, **settings})
        self.smp = smp
        self.model = smp.DistributedModel((Net(width) if model is None else model).to(dtype))
        self.dtype = dtype
        options = {"lr": 1e-2, **({"momentum": 0.9} if kind == "SGD" else {})}
        self.optimizer = smp.DistributedOptimizer(optimizer_of(self.model.parameters(), kind, options))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.batch = 0

        @smp.step
        def train_step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.cross_entropy(model(x), y)
            model.backward(loss)
            return loss

        self.step = train_step

    def train(self, steps: int, *, begin: int | None = None) -> list[float]:
        """Makes some steps; returns the loss of each."""
        losses = []
        self.batch = self.batch if begin is None else begin
        for _ in range(steps):
            generator = torch.Generator().manual_seed(1000 * self.batch + self.smp.dp_rank())
            x = torch.randn(8, WIDTH, generator=generator, dtype=torch.float64).to(
                torch.float32 if self.dtype in (torch.bfloat16, torch.float16) else self.dtype
            )
            y = torch.randint(4, (8,), generator=generator)
            self.optimizer.zero_grad()
            losses.append(self.step(self.model, x, y).reduce_mean().item())
            self.optimizer.step()
            self.scheduler.step()
            self.batch += 1
        return losses


def optimizer_of(parameters: Any, kind: str, options: dict[str, Any]) -> torch.optim.Optimizer:
    """An optimizer with two groups."""
    chosen = list(parameters)
    groups = [{"params": chosen[::2]}, {"params": chosen[1::2], "weight_decay": 0.1}]
    return getattr(torch.optim, kind)(groups, **options)


def plain(state: Any) -> Any:
    """A state with its tensors as lists, for comparing over processes."""
    if isinstance(state, torch.Tensor):
        return state.tolist()
    if isinstance(state, dict | OrderedDict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [plain(value) for value in state]
    return state
