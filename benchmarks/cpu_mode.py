"""What CPU mode costs: calls that it translates, and training steps, beside the same without it.

    OMP_NUM_THREADS=1 python benchmarks/cpu_mode.py [--rounds 15]

Two processes, with CPU mode and without, take turns. Figures are processor time, medians of the rounds; those
of steps have the median of the rounds' ratios.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from machine import circumstances

_CALLS = 20_000


def calls(device: Any) -> dict[str, Callable[[], Any]]:
    """Calls by what stands in a script."""
    x = torch.zeros(2)
    place = torch.device(device)

    def autocast() -> None:
        with torch.autocast(device, torch.bfloat16):
            pass

    return {
        "x.to(device)": lambda: x.to(place),
        "x.is_cuda": lambda: x.is_cuda,
        "torch.zeros(2, device=device)": lambda: torch.zeros(2, device=place),
        "torch.zeros_like(x)": lambda: torch.zeros_like(x),
        'torch.device("cuda")': lambda: torch.device("cuda"),
        "torch.Stream(device)": lambda: torch.Stream(place),
        "with torch.autocast(device)": autocast,
    }


def convolutional() -> tuple[nn.Module, Tensor]:
    """A network for digits, and a batch of 16."""
    features = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(8 * 13 * 13, 10)), torch.randn(16, 1, 28, 28)


def transformer() -> tuple[nn.Module, Tensor]:
    """Two small layers, and 4 sequences of 16 tokens."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(4, 16, 64)


def training(make: Callable[[], tuple[nn.Module, Tensor]], device: str, *, mixed: bool) -> Callable[[], None]:
    """A training step as scripts have it, the batch sent to the device in each."""
    torch.manual_seed(0)
    model, batch = make()
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        x = batch.to(device, non_blocking=True)
        with torch.autocast(device, torch.bfloat16, enabled=mixed):
            loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def steps(device: str) -> dict[str, Callable[[], None]]:
    """Training steps by name."""
    return {
        "step, convolutional": training(convolutional, device, mixed=False),
        "step, transformer": training(transformer, device, mixed=False),
        "step, transformer, bfloat16": training(transformer, device, mixed=True),
    }


def measure() -> None:
    """Measures each thing when told to, and writes microseconds down."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    things = {name: (call, _CALLS) for name, call in calls(device).items()}
    things |= {name: (step, 20) for name, step in steps(device).items()}
    for line in sys.stdin:
        thing, times = things[line.rstrip("\n")]
        begin = time.process_time()
        for _ in range(times):
            thing()
        print((time.process_time() - begin) / times * 1e6, flush=True)


def rounds(number: int) -> Iterator[tuple[str, float, float]]:
    """Name of a thing, and its microseconds without CPU mode and with it."""
    modes = ([], ["-m", "shardwright.cpu_mode"])
    sides = [
        subprocess.Popen([sys.executable, *mode, __file__, "--measure"], stdin=-1, stdout=-1, text=True)
        for mode in modes
    ]
    for turn in range(number + 1):  # the first one warms up
        for name in (*calls("cpu"), *steps("cpu")):
            found: dict[int, float] = {}
            for side in (0, 1) if turn % 2 else (1, 0):
                stdin: Any = sides[side].stdin
                stdout: Any = sides[side].stdout
                print(name, file=stdin, flush=True)
                found[side] = float(stdout.readline())
            if turn:
                yield name, found[0], found[1]
    for process in sides:
        process.communicate()


def main() -> None:
    """Takes turns, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure()
        return
    print(circumstances())
    found: dict[str, list[tuple[float, float]]] = {}
    for name, without, with_it in rounds(arguments.rounds):
        found.setdefault(name, []).append((without, with_it))
    for name, pairs in found.items():
        without, with_it = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
        ratio = statistics.median(pair[1] / pair[0] for pair in pairs)
        print(f"{name:32} {without:10.2f} us {with_it:10.2f} us   {ratio:.3f}")


if __name__ == "__main__":
    main()
