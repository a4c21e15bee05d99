"""Measures what offload of activations does on a CPU, where the tier is a file on a disk.

    python benchmarks/offload.py                 # some minutes
    python benchmarks/offload.py --quick         # does it still run?
    python benchmarks/offload.py --check --json found.json

A  peak memory of each rank (live bytes of PyTorch's allocator, over a whole step with AdamW) and seconds of a
   step, predicted and measured, with and without offload
B  the largest batch of which the peak stays below a limit, with and without offload: predicted by plans,
   measured by live bytes. A limit is what the plan without offload needs for a batch of the first size.

Steps are timed alone, after two that warm up; the median counts. Memory is measured apart from time.
"""

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from check import Check, lines
from live_bytes import LiveBytes
from machine import circumstances
from models import gpt
from sections import parser_for
from shardwright.errors import InfeasiblePlanError
from shardwright.quantities import format_bytes, format_seconds
from shardwright.run.context import context
from shardwright.testing import run_ranks
from shardwright_side import Ours

_STEPS = 7
_MEMORY_TARGET, _TIME_TARGET, _BATCH_TARGET = 0.05, 0.07, 0.05
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is trained, and how.

    Attributes:
        ranks: of the pipeline.
        microbatches: of a batch.
        kind: family of schedules.
        recompute: the setting `activation_checkpointing`.
        layers: of the model.
        width: of its layers.
        length: of sequences.
    """

    ranks: int
    microbatches: int
    kind: str
    recompute: str = "none"
    layers: int = 12
    width: int = 256
    length: int = 128

    @property
    def name(self) -> str:
        """In a table."""
        again = "" if self.recompute == "none" else ", recomputed"
        ranks, parts = f"rank{'s' * (self.ranks > 1)}", f"microbatch{'es' * (self.microbatches > 1)}"
        return f"{self.ranks} {ranks}, {self.kind}, {self.microbatches} {parts}{again}"

    def settings(self, *, offload: bool) -> dict[str, Any]:
        """For `sw.init`."""
        return {
            "microbatches": self.microbatches,
            "pipeline": self.kind,
            "activation_checkpointing": self.recompute,
            "offload_activations": offload,
            "activation_loading_horizon": 1,
            "plan_one_stage": True,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One rank.

    Attributes:
        setup: name of the set-up.
        offload: with offload.
        batch: samples of a batch.
        rank: of the pipeline.
        predicted_bytes: peak of the plan.
        bytes: live bytes, most.
        predicted_s: of a step.
        seconds: median; 0 where only memory was measured.
        offloaded_bytes: of a microbatch, by the plan.
    """

    setup: str
    offload: bool
    batch: int
    rank: int
    predicted_bytes: int
    bytes: int
    predicted_s: float
    seconds: float
    offloaded_bytes: int

    @property
    def memory_error(self) -> float:
        """Predicted against measured."""
        return self.predicted_bytes / self.bytes - 1

    @property
    def time_error(self) -> float:
        """Predicted against measured."""
        return self.predicted_s / self.seconds - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The largest batch below a limit.

    Attributes:
        setup: name of the set-up.
        limit_bytes: of the neediest rank.
        predicted: samples without offload, and with it.
        measured: the same, between sizes that were measured.
    """

    setup: str
    limit_bytes: int
    predicted: tuple[float, float]
    measured: tuple[float, float]

    @property
    def error(self) -> float:
        """Of the growth, predicted against measured."""
        return (self.predicted[1] / self.predicted[0]) / (self.measured[1] / self.measured[0]) - 1


def measure(setup: Setup, *, offload: bool, batch: int, timed: bool) -> list[Found]:
    """All ranks."""
    return run_ranks(_measured, setup.ranks, setup, offload, batch, timed, timeout_s=400)


def _measured(setup: Setup, offload: bool, batch: int, timed: bool) -> Found:
    task = gpt(layers=setup.layers, width=setup.width, length=setup.length, batch=batch)
    with LiveBytes() as allocator:
        ours = Ours(task, task.build(), setup.settings(offload=offload))
        optimizer = torch.optim.AdamW(ours.model.local_parameters())
        for _ in range(2):
            ours.step()
            optimizer.step()
        gc.collect()
        with allocator.counted():
            ours.step()
            optimizer.step()
    peers = context().links.local_peers
    shared = 0 if peers is None else peers.num_bytes
    taken_s = []
    for _ in range(_STEPS if timed else 0):
        if dist.is_initialized():
            dist.barrier()
        begin_s = time.perf_counter()
        ours.step()
        taken_s.append(time.perf_counter() - begin_s)
    rank = ours.context.pipeline_rank
    predicted = ours.plan.prediction
    assert predicted is not None
    return Found(
        setup=setup.name,
        offload=offload,
        batch=batch,
        rank=rank,
        predicted_bytes=predicted.memory[rank].peak_bytes,
        bytes=allocator.peak + shared,
        predicted_s=predicted.step_s,
        seconds=statistics.median(taken_s) if timed else 0.0,
        offloaded_bytes=sum(
            stage.offload_bytes
            for stage, plan in zip(predicted.stages, ours.plan.stages, strict=True)
            if plan.rank == rank
        ),
    )


def grow(setup: Setup, *, batch: int, factor: int) -> Growth:
    """The largest batches, between two sizes each: memory grows in proportion."""

    def largest(offload: bool) -> tuple[float, float]:
        sizes = (batch, batch * factor) if offload else (batch, 2 * batch)
        small, large = (measure(setup, offload=offload, batch=size, timed=False) for size in sizes)
        return tuple(  # type: ignore[return-value]
            _crossing(sizes, [max(getattr(f, name) for f in found) for found in (small, large)], limit)
            for name in ("predicted_bytes", "bytes")
        )

    limit = max(found.predicted_bytes for found in measure(setup, offload=False, batch=batch, timed=False))
    without, with_it = largest(False), largest(True)
    return Growth(
        setup=setup.name,
        limit_bytes=limit,
        predicted=(without[0], with_it[0]),
        measured=(without[1], with_it[1]),
    )


def _crossing(sizes: Sequence[int], num_bytes: Sequence[float], limit: float) -> float:
    """The size at which a line through two points comes to a limit."""
    slope = (num_bytes[1] - num_bytes[0]) / (sizes[1] - sizes[0])
    return sizes[0] + (limit - num_bytes[0]) / slope


def table(found: Sequence[Found]) -> list[str]:
    """Rank by rank."""
    rows = [f"{'':44} offload rank  predicted   measured   error   predicted   measured   error   offloaded"]
    for f in found:
        seconds = (
            f"{format_seconds(f.predicted_s):>10} {format_seconds(f.seconds):>10} {f.time_error:+7.1%}"
            if f.seconds
            else " " * 29
        )
        rows.append(
            f"{f.setup:44} {'yes' if f.offload else 'no':>7} {f.rank:4} "
            f"{f.predicted_bytes / _MIB:7.1f} MiB {f.bytes / _MIB:6.1f} MiB {f.memory_error:+7.1%}  "
            f"{seconds} {format_bytes(f.offloaded_bytes):>11}"
        )
    return rows


def checks(found: Sequence[Found], growths: Sequence[Growth]) -> list[Check]:
    """The worst of each kind."""
    memory = max((f for f in found if f.offload), key=lambda f: abs(f.memory_error))
    timed = max((f for f in found if f.offload and f.seconds), key=lambda f: abs(f.time_error))
    growth = max(growths, key=lambda g: abs(g.error))
    return [
        Check(
            section="A",
            what="peak memory with offload, predicted against live bytes",
            value=abs(memory.memory_error),
            target=_MEMORY_TARGET,
            where=f"{memory.setup}, rank {memory.rank}",
            percent=True,
        ),
        Check(
            section="A",
            what="step with offload, predicted against measured",
            value=abs(timed.time_error),
            target=_TIME_TARGET,
            where=timed.setup,
            percent=True,
        ),
        Check(
            section="B",
            what="growth of the largest batch, predicted against measured",
            value=abs(growth.error),
            target=_BATCH_TARGET,
            where=growth.setup,
            percent=True,
        ),
    ]


def setups(*, quick: bool) -> list[Setup]:
    """What is measured."""
    if quick:
        return [Setup(ranks=1, microbatches=2, kind="1f1b", layers=4, width=64, length=64)]
    return [
        Setup(ranks=1, microbatches=1, kind="1f1b"),
        Setup(ranks=1, microbatches=4, kind="1f1b"),
        Setup(ranks=1, microbatches=2, kind="1f1b", recompute="full"),
        Setup(ranks=2, microbatches=4, kind="gpipe"),
        Setup(ranks=2, microbatches=4, kind="1f1b"),
        Setup(ranks=2, microbatches=4, kind="zb_h1"),
    ]


def main() -> int:
    """Prints tables; with ``--check``, ends with 1 where a target is missed."""
    parser = parser_for(__doc__, quick="small models, few cases")
    parser.add_argument("--only", default="", help="set-ups whose name has this")
    asked = parser.parse_args()
    chosen = [setup for setup in setups(quick=asked.quick) if asked.only in setup.name]
    where = circumstances()
    print(" | ".join(f"{key} {value}" for key, value in where.items()))
    found: list[Found] = []
    batch = 4 if asked.quick else 16
    for setup in chosen:
        for offload in (False, True):
            rows = measure(setup, offload=offload, batch=batch, timed=True)
            found += rows
            print("\n".join(table(rows) if len(found) == len(rows) else table(rows)[1:]), flush=True)
    growths = []
    for setup in chosen if asked.quick else chosen[::2]:
        growths.append(grow(setup, batch=4 if asked.quick else 8, factor=2 if asked.quick else 3))
        last = growths[-1]
        print(
            f"{last.setup:44} limit {format_bytes(last.limit_bytes)}: largest batch predicted "
            f"{last.predicted[0]:.1f} -> {last.predicted[1]:.1f}, measured {last.measured[0]:.1f} -> "
            f"{last.measured[1]:.1f}: growth {last.error:+.1%}",
            flush=True,
        )
    done = checks(found, growths)
    print("\n".join(lines(done)))
    if asked.json:
        document = {
            "circumstances": where,
            "found": [asdict(each) for each in found],
            "growth": [asdict(each) for each in growths],
        }
        asked.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(asked.check and not asked.quick and not all(check.passes for check in done))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InfeasiblePlanError as error:
        sys.exit(str(error))
