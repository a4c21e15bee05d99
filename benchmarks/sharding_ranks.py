"""What each rank of `sharding.py` does: steps of one model through several libraries, in turns.

Contenders::

    ddp      DistributedDataParallel                        fsdp2-N   fully_shard per block, shard groups of N
    ours-N   Shardwright, sharded_data_parallel_degree N    zero1, zero2, zero3, hpz-N   DeepSpeed
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardwright.torch as sw
from shardwright.run.context import context, set_context

__all__ = ["GPT", "contender_of", "race", "tokens_of"]

VOCABULARY, WIDTH, BLOCKS, HEADS, LENGTH = 4096, 256, 12, 4, 256
BATCH = 8

Step = Callable[[Tensor], float]


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        b, t, c = h.shape
        qkv = self.qkv(self.norm1(h)).view(b, t, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.projection(mixed.transpose(1, 2).reshape(b, t, c))
        return h + self.down(F.gelu(self.up(self.norm2(h))))


class GPT(nn.Module):
    """11.7 million parameters; gives the loss of the next token.

    Shapes: tokens (B, T + 1); h (B, T, C).
    """

    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, y = tokens[:, :-1], tokens[:, 1:]
        h = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


def contender_of(name: str, *, blocks: int = BLOCKS, **settings: Any) -> Step:
    """A function that trains one step on this rank's tokens, and returns the loss.

    Args:
        name: of the contender.
        blocks: of the model.
        settings: further settings of ours.
    """
    torch.manual_seed(0)
    model = GPT(blocks)
    kind, _, number = name.partition("-")
    if kind == "ours":
        return _ours(model, int(number), settings)
    if kind in ("zero1", "zero2", "zero3", "hpz"):
        return _deepspeed(model, kind, int(number or 1))
    if kind == "ddp":
        wrapped: nn.Module = DistributedDataParallel(model)
    else:
        wrapped = _fsdp2(model, int(number))
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)

    def step(tokens: Tensor) -> float:
        optimizer.zero_grad()
        loss = wrapped(tokens)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def _ours(model: nn.Module, degree: int, settings: dict[str, Any]) -> Step:
    set_context(None)  # several runs side by side in one process
    replicas = dist.get_world_size() // settings.get("pipeline_parallel_degree", 1)
    base = {"run_dir": "off", "data_parallel_degree": replicas, "sharded_data_parallel_degree": degree}
    sw.init({**base, **settings})
    wrapped = sw.DistributedModel(model)
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(wrapped.parameters(), lr=1e-3))
    own = context()

    @sw.step
    def train(model: Any, tokens: Tensor) -> Tensor:
        loss = model(tokens)
        model.backward(loss)
        return loss

    def step(tokens: Tensor) -> float:
        set_context(own)
        optimizer.zero_grad()
        loss = train(wrapped, tokens).reduce_mean()
        optimizer.step()
        return loss.item()

    return step


def _fsdp2(model: GPT, degree: int) -> nn.Module:
    size = dist.get_world_size()
    if degree == size:
        mesh = init_device_mesh("cpu", (size,))
    else:
        mesh = init_device_mesh("cpu", (size // degree, degree), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _deepspeed(model: nn.Module, kind: str, number: int) -> Step:
    import deepspeed

    zero: dict[str, Any] = {"stage": 3 if kind == "hpz" else int(kind[-1])}
    if kind == "hpz":
        zero["zero_hpz_partition_size"] = number
    config = {
        "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(),
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )

    def step(tokens: Tensor) -> float:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def tokens_of(step: int, *, parts: int, part: int, batch: int = BATCH) -> Tensor:
    """(batch / parts, LENGTH + 1) tokens, of which every part of a step has others."""
    generator = torch.Generator().manual_seed(step)
    whole = torch.randint(0, VOCABULARY, (batch, LENGTH + 1), generator=generator)
    return whole.chunk(parts)[part].contiguous()


def race(names: list[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of two steps of every contender, round by round, as the slowest rank has them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    steps = {name: contender_of(name) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        order = names if number % 2 else names[::-1]
        for name in order:
            dist.barrier()
            start = time.perf_counter()
            for index in range(2):
                steps[name](tokens_of(2 * number + index, parts=size, part=rank))
            dist.barrier()
            if number:  # the first one warms up
                times[name].append((time.perf_counter() - start) / 2)
    return times


def main() -> None:
    """Races under torchrun; rank 0 writes what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--names", nargs="+", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    times = race(options.names, options.rounds)
    times["bytes of the model"] = [float(sum(p.nbytes for p in GPT().parameters()))]
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(times))
    dist.barrier()
    os._exit(0)  # several libraries with groups and hooks of their own in one process


if __name__ == "__main__":
    main()
