"""What each rank of `collectives.py` does: the same collectives through both backends, in turns."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import shardwright.torch  # noqa: F401  makes the backend known
from shardwright.comm.collective_probe import measure_prices

__all__ = ["COLLECTIVES", "Timing", "time_collectives"]

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
# Ranks come out of a barrier one after the other: of few calls, that would be a large part.
_ENOUGH_S = 0.03
_MOST_CALLS = 200


@dataclass(frozen=True, slots=True)
class Timing:
    """One collective of one size, in seconds a call: medians over rounds of the slowest rank.

    Attributes:
        collective: which one.
        num_bytes: of the whole: of the output of an all-gather, the input of a reduce-scatter.
        ours_s: through the backend `shardwright`.
        gloo_s: through gloo.
        ratio: median over rounds of ours / gloo.
        spread: half of the distance between the quartiles of that ratio.
    """

    collective: str
    num_bytes: int
    ours_s: float
    gloo_s: float
    ratio: float
    spread: float


def time_collectives(collectives: Sequence[str], sizes: Sequence[int], rounds: int) -> list[Timing]:
    """Times every collective and size on both sides; all ranks get the same figures."""
    groups = {"ours": dist.new_group(backend="shardwright"), "gloo": dist.new_group(backend="gloo")}
    group = groups["ours"]
    group.communicator.use(measure_prices(group.communicator))
    found = []
    for collective in collectives:
        for num_bytes in sizes:
            calls = {side: _call_of(collective, num_bytes, group) for side, group in groups.items()}
            number = _number_of_calls(calls["gloo"])
            times: dict[str, list[float]] = {side: [] for side in groups}
            for call in calls.values():
                _seconds(call, 1)
            for number_of_round in range(rounds):
                order = ["ours", "gloo"] if number_of_round % 2 else ["gloo", "ours"]
                for side in order:
                    times[side].append(_seconds(calls[side], number))
            ratios = [ours / gloo for ours, gloo in zip(times["ours"], times["gloo"], strict=True)]
            quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
            found.append(
                Timing(
                    collective,
                    num_bytes,
                    statistics.median(times["ours"]),
                    statistics.median(times["gloo"]),
                    statistics.median(ratios),
                    (quartiles[2] - quartiles[0]) / 2,
                )
            )
    return found


def _call_of(collective: str, num_bytes: int, group: dist.ProcessGroup) -> Callable[[], object]:
    size = dist.get_world_size()
    count = max(1, num_bytes // 4 // size)
    whole, part = torch.zeros(count * size), torch.zeros(count)
    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: dist.all_gather_single(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
    }
    return calls[collective]


def _number_of_calls(call: Callable[[], object]) -> int:
    """So many that they take long enough to be timed; the same on all ranks."""
    number = torch.tensor([min(_MOST_CALLS, max(1, int(_ENOUGH_S / _seconds(call, 2))))])
    dist.broadcast(number, 0)
    return int(number)


def _seconds(call: Callable[[], object], number: int) -> float:
    """Of a call, on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(number):
        call()
    seconds = torch.tensor([(time.perf_counter() - start) / number], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def main() -> None:
    """Under torchrun: rank 0 writes the figures to a file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    found = time_collectives(COLLECTIVES, options.sizes, options.rounds)
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps([asdict(timing) for timing in found]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
