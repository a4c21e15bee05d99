"""Measures what planning takes: without ranks, from costs that are estimated.

python benchmarks/planning.py
python benchmarks/planning.py --quick        # the small cases, once after a warm-up
python benchmarks/planning.py --check        # targets only; fails if one is missed
python benchmarks/planning.py --degrees      # searching degrees, by closed forms and by planning every grid
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from check import Check, lines
from machine import circumstances
from models import gpt
from shardwright.cli.commands.compare import diff_plans
from shardwright.cluster import Cluster, Device, Link
from shardwright.config import Config
from shardwright.mesh import Mesh
from shardwright.plan import Plan
from shardwright.planner import (
    Candidates,
    best_of_meshes,
    estimate_profile,
    make_plan,
    meshes,
    microbatch_counts,
)
from shardwright.schedule import build_schedule, chain_edges, place_stages, simulate, unit_costs
from shardwright.text import align
from shardwright.torch.units.dry_run import trace_model
from shardwright.torch.units.offline_planner import OfflinePlanner

_BATCH = 64

_CLUSTER = Cluster(
    device=Device(name="assumed", flops_per_s=1e13, memory_Bps=1e12, overhead_s=1e-5),
    ranks_per_node=8,
    intra_node=Link(latency_s=1e-5, bandwidth_Bps=1e11),
    inter_node=Link(latency_s=3e-5, bandwidth_Bps=1e10),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Something to time.

    Attributes:
        what: in words.
        run: does it once.
        target_s: seconds that it may take; 0 where nothing is promised.
    """

    what: str
    run: Callable[[], object]
    target_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A case with its seconds, one of each run."""

    what: str
    target_s: float
    seconds: list[float]

    @property
    def median_s(self) -> float:
        """What counts."""
        return statistics.median(self.seconds)


def main() -> int:
    """Times every case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the small cases, once after a warm-up")
    parser.add_argument("--check", action="store_true", help="print targets only; fail if one is missed")
    parser.add_argument("--degrees", action="store_true", help="time plan --search-degrees, once each")
    parser.add_argument("--json", type=Path, help="file for all raw figures")
    options = parser.parse_args()
    where = circumstances()
    if options.degrees:
        print("\n".join(f"{key}: {value}" for key, value in where.items()), end="\n\n")
        print(
            align([_HEADER, *map(_searched, ((12, 8),) if options.quick else ((12, 8), (12, 16), (24, 64)))])
        )
        return 0
    found = [_timed(case, repeats=1 if options.quick else 5) for case in _cases(quick=options.quick)]
    checks = [
        Check(section="P", what=f"{case.what}: ms", value=1e3 * case.median_s, target=1e3 * case.target_s)
        for case in found
        if case.target_s
    ]
    if not options.check:
        print("\n".join(f"{key}: {value}" for key, value in where.items()), end="\n\n")
        print(align([["what", "median", "best", "worst"], *map(_row, found)]), end="\n\n")
    print("\n".join(lines(checks)))
    if options.json is not None:
        document = {**where, "cases": [dataclasses.asdict(case) for case in found]}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if options.check and not all(check.passes for check in checks) else 0


def _cases(*, quick: bool) -> Iterator[Case]:
    yield from _simulations()
    yield from _plans(((12, 2),) if quick else ((12, 2), (48, 4), (96, 16)))


def _simulations() -> Iterator[Case]:
    large = build_schedule(
        "interleaved_1f1b", stage_ranks=place_stages("interleaved_1f1b", num_ranks=8), num_microbatches=64
    )
    small = build_schedule("1f1b", stage_ranks=(0, 1, 2, 3), num_microbatches=8)
    edges = chain_edges(16, num_bytes=1000)
    link = Link(latency_s=1e-3, bandwidth_Bps=1e6)
    yield Case(
        what="simulate 4 stages, 8 microbatches",
        run=lambda: simulate(small, unit_costs(4), edges=edges[:3], link=lambda *_: link),
        target_s=0.005,
    )
    yield Case(
        what="simulate 16 stages on 8 ranks, 64 microbatches, shared cores",
        run=lambda: simulate(large, unit_costs(16), edges=edges, link=lambda *_: link, cores=2),
        target_s=0.1,
    )


def _plans(sizes: Sequence[tuple[int, int]]) -> Iterator[Case]:
    for layers, ranks in sizes:
        yield Case(
            what=f"plan a GPT of {layers} blocks on {ranks} ranks",
            run=partial(
                make_plan,
                _candidates(layers, ranks),
                cluster=_CLUSTER,
                config=Config(),
                mesh=Config().resolve_world(ranks),
            ),
        )


def _candidates(layers: int, ranks: int) -> Candidates:
    task = gpt(layers=layers, batch=_BATCH)
    with torch.device("meta"):
        model = task.build()
    found = {}
    for m in microbatch_counts(_BATCH, config=Config(), pipeline=ranks):
        x, y = (tensor[: _BATCH // m] for tensor in task.batch())
        graph = trace_model(model, x, loss=lambda scores, y=y: task.loss(scores, y), num_stages=2 * ranks)
        found[m] = graph, estimate_profile(graph, device=_CLUSTER.device)
    return found


_HEADER = ["what", "every grid", "closed forms first", "grids", "planned", "plans"]


def _searched(size: tuple[int, int]) -> list[str]:
    """One search of degrees by planning every grid, and one by closed forms first; traces count."""
    layers, ranks = size
    task, config = gpt(layers=layers, batch=_BATCH), Config()
    with torch.device("meta"):
        model = task.build()
    x, _ = task.batch()
    grids = meshes(ranks, config)
    seconds, planned, plans = [], [], []
    for by_closed_forms in (False, True):
        asked: list[Mesh] = []
        start_s = time.perf_counter()
        planner = OfflinePlanner(model, ((x,), {}), config=config, cluster=_CLUSTER)

        def make(mesh: Mesh, planner: OfflinePlanner = planner, asked: list[Mesh] = asked) -> Plan:
            asked.append(mesh)
            return planner.plan(mesh)

        expected = planner.expected_seconds(grids) if by_closed_forms else None
        plans.append(best_of_meshes(grids, make, expected=expected))
        seconds.append(time.perf_counter() - start_s)
        planned.append(len(asked))
    same = diff_plans(*plans).decision == ()
    return [
        f"a GPT of {layers} blocks on {ranks} ranks",
        *(f"{s:.1f} s" for s in seconds),
        *map(str, planned),
        "the same" if same else "differ",
    ]


def _timed(case: Case, *, repeats: int) -> Timed:
    case.run()  # imports, caches
    seconds = []
    for _ in range(repeats):
        before_s = time.perf_counter()
        case.run()
        seconds.append(time.perf_counter() - before_s)
    return Timed(what=case.what, target_s=case.target_s, seconds=seconds)


def _row(case: Timed) -> list[str]:
    return [case.what, *(f"{1e3 * s:.1f} ms" for s in (case.median_s, min(case.seconds), max(case.seconds)))]


if __name__ == "__main__":
    sys.exit(main())
