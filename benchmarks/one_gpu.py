"""A training step of one process on a GPU: Shardwright beside a plain loop over the same microbatches.

    python benchmarks/one_gpu.py [--rounds 20] [--json FILE] [--quick]

Both sides train GPT-2s of the given sizes in bfloat16 with fused AdamW and take turns in one process. Seconds
are those of the clock, from the step's first call until the GPU has done all of it; the host's seconds end
where Python may go on. Without a GPU the same runs on the CPU, smaller.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.testing import run_ranks

__all__ = ["Size", "measure"]

_WARM_UP = 4
_MICROBATCHES = 4
_VOCABULARY = 8192


@dataclass(frozen=True, slots=True)
class Size:
    """A GPT-2 and its batch.

    Attributes:
        width: of its hidden states.
        layers: how many blocks.
        tokens: of a sample.
        samples: of a batch.
    """

    width: int
    layers: int
    tokens: int
    samples: int

    def model(self) -> nn.Module:
        """The model with random weights, without dropout."""
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=_VOCABULARY,
                n_positions=self.tokens,
                n_embd=self.width,
                n_layer=self.layers,
                n_head=self.width // 64,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                attn_implementation="sdpa",
                use_cache=False,
            )
        )


ON_GPU = (Size(1024, 24, 1024, 16), Size(768, 12, 512, 16), Size(256, 12, 128, 16))
ON_CPU = (Size(128, 4, 64, 8),)


def measure(size: Size, on_nonfinite: str, rounds: int) -> dict[str, Any]:
    """Seconds of each side, round by round; to be run on one rank."""
    import shardwright.torch as sw

    sw.init(
        {
            "microbatches": _MICROBATCHES,
            "run_dir": "off",
            "profile": "estimated",
            "on_nonfinite": on_nonfinite,
            "log_interval": 1_000_000,
        }
    )
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    plain = size.model().to(device, torch.bfloat16)
    wrapped = sw.DistributedModel(copy.deepcopy(plain))
    plain_updates = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=on_gpu)
    updates = sw.DistributedOptimizer(torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=on_gpu))
    batch = torch.randint(0, _VOCABULARY, (size.samples, size.tokens), device=device)
    losses: dict[str, list[float]] = {"plain": [], "ours": []}

    @sw.step
    def train(model: Any, x: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=x, labels=x).loss
        model.backward(loss)
        return loss

    def ours() -> Tensor:
        updates.zero_grad(set_to_none=True)
        loss = train(wrapped, batch).reduce_mean()
        updates.step()
        return loss

    def alone() -> Tensor:
        plain_updates.zero_grad(set_to_none=True)
        total = torch.zeros((), device=device)
        for part in batch.chunk(_MICROBATCHES):
            loss = plain(input_ids=part, labels=part).loss / _MICROBATCHES
            loss.backward()
            total += loss.detach()
        plain_updates.step()
        return total

    seconds: dict[str, list[float]] = {"plain": [], "ours": []}
    host: dict[str, list[float]] = {"plain": [], "ours": []}
    peak: dict[str, float] = {}
    sides: dict[str, Callable[[], Tensor]] = {"plain": alone, "ours": ours}
    for number in range(_WARM_UP + rounds):
        for name in ("plain", "ours") if number % 2 else ("ours", "plain"):
            if on_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            begun_s = time.perf_counter()
            loss = sides[name]()
            returned_s = time.perf_counter()
            if on_gpu:
                torch.cuda.synchronize()
                peak[name] = torch.cuda.max_memory_allocated() / 2**30
            if number >= _WARM_UP:
                seconds[name].append(time.perf_counter() - begun_s)
                host[name].append(returned_s - begun_s)
            losses[name].append(float(loss))
    ratios = [a / b for a, b in zip(seconds["ours"], seconds["plain"], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    return {
        "size": asdict(size),
        "on_nonfinite": on_nonfinite,
        "seconds": {name: statistics.median(each) for name, each in seconds.items()},
        "host_s": {name: statistics.median(each) for name, each in host.items()},
        "ratio": {"median": median, "quartiles": [low, high]},
        "peak_gib": peak,
        "largest_difference_of_losses": max(
            abs(a - b) for a, b in zip(losses["ours"], losses["plain"], strict=True)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="the smallest size, four rounds")
    options = parser.parse_args()
    sizes = ON_GPU if torch.cuda.device_count() else ON_CPU
    rounds = 4 if options.quick else options.rounds
    rows = []
    for size in sizes[-1:] if options.quick else sizes:
        for choice in ("stop", "ignore"):
            (row,) = run_ranks(measure, 1, size, choice, rounds, timeout_s=200)
            rows.append(row)
            name = f"{size.layers} x {size.width}, {size.tokens} tokens, on_nonfinite {choice}"
            ratio = row["ratio"]
            print(
                f"{name:55} plain {row['seconds']['plain'] * 1e3:7.2f} ms, "
                f"ours {row['seconds']['ours'] * 1e3:7.2f} ms, ratio {ratio['median']:.3f} "
                f"({ratio['quartiles'][0]:.3f} to {ratio['quartiles'][1]:.3f}); "
                f"host {row['host_s']['plain'] * 1e3:.2f}, {row['host_s']['ours'] * 1e3:.2f} ms; "
                f"peak GiB {row['peak_gib']}; losses differ by {row['largest_difference_of_losses']:.1e}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
