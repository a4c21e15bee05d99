"""The script that `faults.py` disturbs: a small training with checkpoints, by us or by PyTorch alone.

    python faults_train.py LAYOUT STEPS PAUSE_S TIMEOUT_S FOLDER

Each rank notes its process in FOLDER, and the first rank each step. LAYOUT ``stock`` is DDP with
torch.distributed.checkpoint: then the fault is in FAULT, as ``kind,rank,step``.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_LAYOUT, _STEPS, _PAUSE_S, _TIMEOUT_S, _FOLDER = sys.argv[1:]
_RANK = int(os.environ["RANK"])
_BEGAN_S = time.time()
Path(_FOLDER, f"pid{os.getpid()}").write_text(str(_RANK))

EVERY = 10
"""Steps between two checkpoints."""


def note(step: int, loss: float) -> None:
    """Says that a step is done."""
    if _RANK == 0:
        line = {
            "pid": os.getpid(),
            "step": step,
            "at_s": time.time(),
            "loss": loss.hex(),
            "began_s": _BEGAN_S,
        }
        with Path(_FOLDER, "steps.jsonl").open("ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")
    time.sleep(float(_PAUSE_S))


def build() -> nn.Module:
    """Eight small blocks."""
    torch.manual_seed(0)
    np.random.seed(0)  # checkpoints have its state, too
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)))


def batch(step: int) -> Tensor:
    """That of a step, whatever happened before."""
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(step))


def ours() -> None:
    """Trains with Shardwright."""
    import shardwright.torch as sw

    ranks = int(os.environ["WORLD_SIZE"])
    degrees: dict[str, Any] = {
        "pipeline": {"pipeline_parallel_degree": ranks, "microbatches": 4},
        "replicas": {"pipeline_parallel_degree": 1},
        "shards": {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": ranks},
        "tensor": {"pipeline_parallel_degree": 1, "tensor_parallel_degree": ranks},
    }[_LAYOUT]
    sw.init(
        {
            "microbatches": 2,
            "timeout_s": float(_TIMEOUT_S),
            "profile": "estimated",
            "report": False,
            **degrees,
        }
    )
    model = sw.DistributedModel(build())
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    checkpoints = sw.Checkpoints(every=EVERY, keep=2)

    @sw.step
    def train(model: Any, x: Tensor) -> Tensor:
        loss = (model(x) - x).square().mean()
        model.backward(loss)
        return loss

    step = checkpoints.resume()
    begin_s, watched_s = time.monotonic(), watch_seconds()
    while step < int(_STEPS):
        optimizer.zero_grad()
        loss = train(model, batch(step))
        optimizer.step()
        step += 1
        note(step, float(loss.reduce_mean()))
        checkpoints.step_done(step)
    if _RANK == 0:
        took_s, share = time.monotonic() - begin_s, watch_seconds() - watched_s
        Path(_FOLDER, "watch.json").write_text(json.dumps({"took_s": took_s, "watch_s": share}))
    checkpoints.save(step)
    checkpoints.wait()


def watch_seconds() -> float:
    """Seconds of the processor of the threads with which ranks watch each other."""
    names = ("shardwright-pulse", "shardwright-whereabouts")
    threads = [each for each in threading.enumerate() if each.name in names]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(each.ident or 0)) for each in threads)


def stock() -> None:
    """Trains with DDP and torch.distributed.checkpoint."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("gloo", timeout=timedelta(seconds=float(_TIMEOUT_S)))
    model = nn.parallel.DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saved = sorted(Path(_FOLDER, "dcp").glob("*/.metadata"))
    step = 0
    state: Callable[[], dict[str, Any]] = lambda: {"model": model.module.state_dict(), "step": step}  # noqa: E731
    if saved:
        loaded = state()
        dcp.load(loaded, checkpoint_id=saved[-1].parent)
        model.module.load_state_dict(loaded["model"])
        step = loaded["step"]
    while step < int(_STEPS):
        optimizer.zero_grad()
        x = batch(step)
        loss = (model(x) - x).square().mean()
        fault(step + 1)
        loss.backward()
        optimizer.step()
        step += 1
        note(step, loss.item())
        if step % EVERY == 0:
            dcp.save(state(), checkpoint_id=Path(_FOLDER, "dcp", f"{step:06}"))
    dist.destroy_process_group()


def fault(step: int) -> None:
    """Has the fault happen, once."""
    from shardwright.testing.faults import happen

    kind, rank, at = os.environ["FAULT"].split(",")
    notes = Path(_FOLDER, "faults.jsonl")
    if int(rank) == _RANK and int(at) == step and not notes.exists():
        notes.write_text(json.dumps({"kind": kind, "rank": _RANK, "step": step, "at_s": time.time()}) + "\n")
        happen(kind)  # type: ignore[arg-type]


if __name__ == "__main__":
    torch.set_num_threads(1)
    stock() if _LAYOUT == "stock" else ours()
