"""Trains with shared parameters until something fails, and writes down what: a script for torchrun.

python training_until_lost.py FOLDER DEGREE TIMEOUT_S
"""

import sys
import time
import traceback
from pathlib import Path

import torch
from torch import nn

import shardwright.torch as sw


def main() -> None:
    """Trains."""
    folder = Path(sys.argv[1])
    sw.init(
        {
            "run_dir": "off",
            "profile": "estimated",
            "sharded_data_parallel_degree": int(sys.argv[2]),
            "data_parallel_degree": 4,
            "sdp_param_persistence_threshold": 0,
            "timeout_s": float(sys.argv[3]),
        }
    )
    torch.manual_seed(0)
    model = sw.DistributedModel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))))
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

    @sw.step
    def train(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    def write(name, text):
        """At a stroke: others wait for the file."""
        partial = folder / f"partial{sw.rank()}"
        partial.write_text(text)
        partial.rename(folder / f"{name}{sw.rank()}")

    try:
        for number in range(1_000_000):
            if number == 3:
                write("trains", "")
            train(model, torch.ones(4, 64))
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError:
        write("error", f"{time.time()}\n{traceback.format_exc()}")
        # torchrun ends the other rank of this host when this one ends.
        deadline_s = time.monotonic() + 5
        while not (folder / f"error{sw.rank() ^ 1}").exists() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        raise


if __name__ == "__main__":
    main()
