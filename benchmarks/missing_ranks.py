"""What it costs ranks to wait for one another at the job's store, and the thread that leaves notes.

    python benchmarks/missing_ranks.py [--only store | thread] [--ranks 64 256 1024] [--quick]

The ranks of the first part are threads of a few processes, each with a connection of its own to one TCP
store, as if each was on a host of its own. The second part trains a tiny model on two ranks, by turns with
and without the thread.
"""

import argparse
import json
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import TCPStore

from machine import circumstances
from shardwright.comm.roll_call import RollCall
from shardwright.comm.whereabouts import Whereabouts
from shardwright.errors import ShardwrightError
from shardwright.testing import run_ranks

_PROCESSES = 4
_ROUNDS = 5
_LATE_S = 10.0
_TIMEOUT_S = 60.0
_SCENARIOS = ("together", "late", "never")


class CountingStore:
    """A store's client that counts requests, and the bytes of what is read and written."""

    def __init__(self, store: Any):
        self._store = store
        self.requests = self.bytes = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            self.requests += 1
            result = function(*arguments)
            self.bytes += sum(len(each) for each in (*arguments, result) if isinstance(each, str | bytes))
            return result

        return call


class SimulatedRank(threading.Thread):
    """One rank of many.

    Args:
        store: its client.
        rank: which one.
        num_ranks: how many there are.
        scenario: what happens.
        begin: when, on the clock of all processes of this machine.
    """

    def __init__(self, store: CountingStore, rank: int, num_ranks: int, scenario: str, begin: Any):
        super().__init__()
        self.store, self.rank, self.num_ranks, self.scenario = store, rank, num_ranks, scenario
        self._begin = begin
        self._at = Whereabouts(store, rank=rank)
        self._calls = RollCall(
            store, self._at, rank=rank, patience_s=1e6, timeout_s=_TIMEOUT_S, local=None, tell=print
        )
        self.outcome: dict[str, Any] = {}

    def _meet(self) -> None:
        self._calls.meet("sw.barrier()", range(self.num_ranks))

    def run(self) -> None:
        is_last = self.rank == self.num_ranks - 1
        self._meet()  # all are connected
        self._begin.wait()
        start_s, requests, num_bytes = time.monotonic(), self.store.requests, self.store.bytes
        if self.scenario == "together":
            for _ in range(_ROUNDS):
                self._meet()
        elif self.scenario == "late":
            if is_last:
                time.sleep(_LATE_S)
                start_s = time.monotonic()
            self._meet()
        elif is_last:
            with self._at.inside("the step function train", range(self.num_ranks)):
                self._at.publish()
                time.sleep(_TIMEOUT_S / 2)
        else:
            try:
                self._meet()
            except ShardwrightError as error:
                self.outcome["error"] = str(error)
        self.outcome |= {
            "start_s": start_s,
            "end_s": time.monotonic(),
            "requests": self.store.requests - requests,
            "bytes": self.store.bytes - num_bytes,
            "waits": not is_last,
        }


def _some_ranks(
    port: int, ranks: Sequence[int], num_ranks: int, scenario: str, begin: Any, told: Any
) -> None:
    threading.stack_size(256 * 1024)
    stores = [CountingStore(TCPStore("127.0.0.1", port, is_master=False)) for _ in ranks]
    simulated = [
        SimulatedRank(store, rank, num_ranks, scenario, begin)
        for store, rank in zip(stores, ranks, strict=True)
    ]
    for each in simulated:
        each.start()
    for each in simulated:
        each.join()
    told.put([each.outcome for each in simulated])


def waiting_at_the_store(num_ranks: int, scenario: str) -> dict[str, float | str]:
    """Has so many ranks meet, and says how long it took and what the store was asked."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn = multiprocessing.get_context("spawn")
    begin, told = spawn.Event(), spawn.Queue()
    processes = [
        spawn.Process(
            target=_some_ranks,
            args=(server.port, range(first, num_ranks, _PROCESSES), num_ranks, scenario, begin, told),
        )
        for first in range(_PROCESSES)
    ]
    for process in processes:
        process.start()
    time.sleep(5 + num_ranks / 50)  # all have met once
    begin.set()
    outcomes = [outcome for _ in processes for outcome in told.get()]
    for process in processes:
        process.join()
    waiting = [outcome for outcome in outcomes if outcome["waits"]]
    start_s = max(outcome["start_s"] for outcome in (outcomes if scenario == "late" else waiting))
    seconds = max(outcome["end_s"] for outcome in waiting) - start_s
    if scenario == "together":
        seconds /= _ROUNDS
    return {
        "ranks": num_ranks,
        "scenario": scenario,
        "seconds": round(seconds, 4),
        "requests": sum(outcome["requests"] for outcome in outcomes),
        "kilobytes": round(sum(outcome["bytes"] for outcome in outcomes) / 1e3),
        "error": next((outcome["error"] for outcome in waiting if "error" in outcome), "")[:200],
    }


def _steps_by_turns(rounds: int, steps: int) -> tuple[list[float], list[float]]:
    """Milliseconds of a step, by turns with the thread that leaves notes and without any of it."""
    import shardwright.torch as sw
    from shardwright.run.context import context

    sw.init({"run_dir": "off", "profile": "estimated", "microbatches": 2, "pipeline_parallel_degree": 2})
    torch.manual_seed(0)
    model = sw.DistributedModel(torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4))))

    @sw.step
    def train(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    x = torch.ones(4, 8)
    run = context()
    whereabouts = run.watch.whereabouts
    assert whereabouts is not None
    whereabouts.close("rests, for a benchmark")
    with_it: list[float] = []
    without: list[float] = []
    for number in range(2 * rounds):
        watched = number % 2 == 0
        run.watch.whereabouts = None
        if watched:
            run.watch.whereabouts = Whereabouts(whereabouts._store, rank=run.rank, run=number + 1)
            run.watch.whereabouts.watch()
        train(model, x)
        sw.barrier()
        begin_s = time.perf_counter()
        for _ in range(steps):
            train(model, x)
        sw.barrier()
        (with_it if watched else without).append((time.perf_counter() - begin_s) / steps * 1e3)
        if run.watch.whereabouts is not None:
            run.watch.whereabouts.close("rests, for a benchmark")
    return with_it, without


def thread(rounds: int, steps: int) -> dict[str, Any]:
    """What the thread, and counting calls, cost a tiny step."""
    with_it, without = run_ranks(_steps_by_turns, 2, rounds, steps, timeout_s=3600)[0]
    ratios = [a / b for a, b in zip(with_it, without, strict=True)]
    return {
        "rounds": rounds,
        "steps a round": steps,
        "milliseconds with it, median": round(statistics.median(with_it), 4),
        "milliseconds without, median": round(statistics.median(without), 4),
        "ratio, median": round(statistics.median(ratios), 5),
        "ratio, quartiles": [round(value, 4) for value in statistics.quantiles(ratios, n=4)],
    }


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--only", choices=("store", "thread"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--scenario", choices=_SCENARIOS, nargs="+", default=_SCENARIOS)
    parser.add_argument("--quick", action="store_true", help="a few steps, to see whether it runs")
    options = parser.parse_args()
    print(json.dumps(circumstances(), indent=2))
    if options.only != "thread":
        for num_ranks in options.ranks[: 1 if options.quick else None]:
            for scenario in options.scenario:
                print(json.dumps(waiting_at_the_store(num_ranks, scenario)), flush=True)
    if options.only != "store":
        print(json.dumps(thread(4, 50) if options.quick else thread(60, 300)), flush=True)


if __name__ == "__main__":
    main()
