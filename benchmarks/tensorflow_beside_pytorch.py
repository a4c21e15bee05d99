"""Measures how much faster two ranks train a GPT than one process: in Keras, and the same GPT in PyTorch.

python benchmarks/tensorflow_beside_pytorch.py [--json FILE] [--blocks N] [--turns N] [--quick] [--check]

Both models have the same layers, widths, biases and number of parameters; both train with Adam on the same
batches, cut into the same microbatches, with the settings of `tensorflow_pipeline`, one thread a rank. In
one process a plain loop goes over the microbatches. The speed-up of a framework is relative to its own
process, so what is compared is the pipelining, and not the kernels.

Contestants take turns, each in processes of its own, PyTorch's and TensorFlow's side by side. One turn gives
one speed-up of each and one ratio of the two; the spread is that of the turns. It needs TensorFlow: run it
with the interpreter of ``make test-tensorflow``.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from check import Check
from machine import circumstances
from shardwright.testing import run_ranks
from shardwright.text import align
from tensorflow_pipeline import (
    MICROBATCHES,
    QUICK,
    RANKS,
    VOCABULARY,
    Size,
    gpt,
    in_one_process,
    over_ranks,
    timed,
)

_EPSILON = 1e-3  # of Keras' layer norms; PyTorch's is smaller


class Block(nn.Module):
    """A block of `gpt`: x is (batch, length, width)."""

    def __init__(self, size: Size):
        super().__init__()
        self.heads = size.heads
        self.norms = nn.ModuleList(nn.LayerNorm(size.width, eps=_EPSILON) for _ in range(2))
        self.query, self.key, self.value, self.output = (nn.Linear(size.width, size.width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        h = self.norms[0](x)
        heads = [
            layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norms[1](x))))


class Gpt(nn.Module):
    """The GPT of `gpt`: ids (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, size: Size):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.num_blocks))
        self.norm, self.head = nn.LayerNorm(size.width, eps=_EPSILON), nn.Linear(size.width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def torch_in_one_process(size: Size, microbatches: int) -> tuple[float, float, list[float]]:
    """A plain loop over the microbatches of a batch, on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Gpt(size)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)

    def train(ids: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for x, y in zip(ids.chunk(microbatches), labels.chunk(microbatches), strict=True):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / microbatches
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    return timed(train, size, tensor=torch.from_numpy)


def torch_over_ranks(size: Size, microbatches: int) -> tuple[float, float, list[float], float]:
    """The same over the ranks of a pipeline; with the seconds that the plan predicts."""
    import shardwright.torch as sw
    from shardwright.run.context import context

    sw.init(
        {"pipeline_parallel_degree": RANKS, "microbatches": microbatches, "run_dir": "off", "report": False}
    )
    torch.manual_seed(0)
    model = sw.DistributedModel(Gpt(size))
    optimizer = sw.DistributedOptimizer(torch.optim.Adam(model.parameters(), 1e-4))

    @sw.step
    def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        model.backward(loss)
        return loss

    def train(ids: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = step(model, ids, labels).reduce_mean()
        optimizer.step()
        return loss

    seconds, of_cores_s, losses = timed(train, size, tensor=torch.from_numpy)
    plan = context().plan
    assert plan is not None
    predicted_s = plan.prediction.step_s
    sw.shutdown()
    return seconds, of_cores_s, losses, predicted_s


def keras_parameters(size: Size) -> int:
    """Elements of all parameters of the Keras model."""
    import tensorflow as tf

    model = gpt(size)
    model(tf.zeros([1, size.length], tf.int64))
    return int(sum(int(tf.size(variable)) for variable in model.trainable_variables))


_CONTESTANTS = {
    "Keras, one process": (in_one_process, 1),
    "PyTorch, one process": (torch_in_one_process, 1),
    "PyTorch, two ranks": (torch_over_ranks, RANKS),
    "Keras, two ranks": (over_ranks, RANKS),
}


_Turn = Mapping[str, Mapping[str, float]]


def one_turn(size: Size) -> _Turn:
    """Each contestant once."""
    turn = {}
    for name, (contestant, ranks) in _CONTESTANTS.items():
        found = run_ranks(contestant, ranks, size, MICROBATCHES, timeout_s=600)
        turn[name] = {
            "step_s": max(rank[0] for rank in found),
            "cores_s": sum(rank[1] for rank in found),
            "last_loss": found[0][2][-1],
        }
    return turn


def speedups(turns: Sequence[_Turn], framework: str) -> list[float]:
    """One process against two ranks, in each turn."""
    sides = f"{framework}, one process", f"{framework}, two ranks"
    return [turn[sides[0]]["step_s"] / turn[sides[1]]["step_s"] for turn in turns]


def table(turns: Sequence[_Turn]) -> str:
    """Median, least and most of each figure."""
    figures = {
        f"{name}, {what} (ms)": [turn[name][key] * 1e3 for turn in turns]
        for key, what in (("step_s", "a step"), ("cores_s", "time of cores"))
        for name in _CONTESTANTS
    }
    figures |= {f"speed-up, {framework}": speedups(turns, framework) for framework in ("Keras", "PyTorch")}
    rows = [["", "median", "least", "most"]]
    for name, values in figures.items():
        digits = 1 if name.endswith("(ms)") else 3
        rows.append([name, *(f"{f(values):.{digits}f}" for f in (statistics.median, min, max))])
    return align(rows)


def refuse_other_parameters(size: Size) -> None:
    """Ends where the two models differ in size."""
    (in_keras,) = run_ranks(keras_parameters, 1, size, timeout_s=100)
    in_torch = sum(parameter.numel() for parameter in Gpt(size).parameters())
    if in_keras != in_torch:
        sys.exit(f"the models differ: {in_keras} parameters in Keras, {in_torch} in PyTorch")


def main() -> int:
    """Measures, prints, and with ``--check`` fails where the target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=Size.num_blocks, help="of the GPT")
    parser.add_argument("--turns", type=int, default=Size.turns)
    parser.add_argument("--quick", action="store_true", help="a tiny model: does it still run?")
    parser.add_argument("--check", action="store_true", help="fail if the target is missed")
    parser.add_argument("--json", type=Path, help="file for all raw figures")
    options = parser.parse_args()
    size = QUICK if options.quick else Size(num_blocks=options.blocks, turns=options.turns)
    about = circumstances()
    print("\n".join(f"{key}: {value}" for key, value in about.items()), flush=True)
    refuse_other_parameters(size)
    turns: list[_Turn] = []
    for number in range(size.turns):
        print(f"... turn {number + 1} of {size.turns}", file=sys.stderr, flush=True)
        turns.append(one_turn(size))
    pairs = zip(speedups(turns, "Keras"), speedups(turns, "PyTorch"), strict=True)
    ratios = [in_keras / in_torch for in_keras, in_torch in pairs]
    print(f"\n{table(turns)}")
    check = Check(
        section="A",
        what="speed-up of two ranks, Keras' / PyTorch's",
        value=statistics.median(ratios),
        target=0.95,
        at_least=True,
    )
    print(f"\n{check.line()}")
    if options.json is not None:
        found = {**about, "size": dataclasses.asdict(size), "turns": turns, "ratios": ratios}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if options.check and not check.passes else 0


if __name__ == "__main__":
    sys.exit(main())
