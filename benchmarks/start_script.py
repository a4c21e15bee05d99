"""The script that `start.py` runs on two ranks: trains one step and notes what it took beyond its imports."""

import json
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # an optimizer would import it
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright.torch as sw
from models import Layered, gpt


def now() -> tuple[float, float]:
    """Processor time, and the clock."""
    return time.process_time(), time.perf_counter()


def toy() -> tuple[Layered, Tensor, Tensor]:
    """Four layers that hardly compute."""
    return Layered([nn.Linear(8, 8) for _ in range(4)]), torch.randn(8, 8), torch.randn(8, 8)


def small_gpt() -> tuple[Layered, Tensor, Tensor]:
    """A GPT of 0.9 million parameters."""
    task = gpt(layers=4, width=128, vocab=512, length=64, batch=8)
    return task.build(), *task.batch()


def main(model_name: str, folder: str) -> None:
    """Trains a step."""
    _ = sw.init, sw.DistributedModel, sw.DistributedOptimizer, sw.step  # imports most of the runtime
    begun = now()
    sw.init({"run_dir": "off"})
    whole, x, y = small_gpt() if model_name == "gpt" else toy()
    model = sw.DistributedModel(whole)
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

    @sw.step
    def train_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        found = model(x)
        same = found.shape == y.shape
        loss = F.mse_loss(found, y) if same else F.cross_entropy(found.flatten(0, 1), y.flatten())
        model.backward(loss)
        return loss

    wrapped = now()
    optimizer.zero_grad()
    train_step(model, x, y).reduce_mean()
    optimizer.step()
    ended = now()
    took = {"cpu": ended[0] - begun[0], "clock": ended[1] - begun[1], "wrapped": wrapped[0] - begun[0]}
    Path(folder, f"rank{sw.rank()}.json").write_text(json.dumps(took))
    sw.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
