"""What saves memory, and what it costs: a GPT with a large vocabulary, beside a plain loop and FSDP2.

    python benchmarks/savings.py            # 32,000 and 128,000 words; moments in fewer bits
    python benchmarks/savings.py --quick    # 8,000
    python benchmarks/savings.py --only "smaller moments"
    python benchmarks/savings.py --only adapters

Each run has processes of its own, and AdamW. *Peak*: the most that the C library's heap has given out in a
step with its update, above what was there before the model; of the rank that takes most. *CPU*: processor
seconds of a step of that rank, the fastest of three; *update*: those of its update. *Predicted*: by the plan,
on one rank and with stages.
"""

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwright.torch as sw
from check import Check
from live_bytes import HeapBytes
from models import Layered, Task, gpt, with_adapters
from sections import Section, parser_for, run_sections
from shardwright.testing import run_ranks
from shardwright_side import Ours

_STEPS = 3
_PAGES = Path(__file__).parents[1] / "docs"
_MICROBATCHES = 2
_SETTINGS: dict[str, Any] = {"microbatches": _MICROBATCHES, "plan": "anew", "measure_s": 10}
_SHARDS = {"sharded_data_parallel_degree": 2}
_RUNS: list[tuple[str, int, dict[str, Any] | None]] = [
    ("plain loop", 1, None),
    ("loss_chunks: off", 1, {"loss_chunks": "off", "plan_one_stage": True}),
    ("loss_chunks: auto", 1, {"loss_chunks": "auto", "plan_one_stage": True}),
    ("2 stages, off", 2, {"loss_chunks": "off", "pipeline": "1f1b"}),
    ("2 stages, auto", 2, {"loss_chunks": "auto", "pipeline": "1f1b"}),
    ("FSDP2", 2, None),
    ("shards, off", 2, {"loss_chunks": "off", **_SHARDS}),
    ("shards, auto", 2, {"loss_chunks": "auto", **_SHARDS}),
]


_MOMENTS: list[tuple[str, int, dict[str, Any] | None]] = [
    ("plain loop", 1, None),
    *((kind, 1, {"optimizer_state": kind, "plan_one_stage": True}) for kind in ("as_is", "bf16", "8bit")),
    *((f"2 stages, {kind}", 2, {"optimizer_state": kind, "pipeline": "1f1b"}) for kind in ("as_is", "8bit")),
    ("FSDP2", 2, None),
    *((f"shards, {kind}", 2, {"optimizer_state": kind, **_SHARDS}) for kind in ("as_is", "8bit")),
]
_ADAPTERS: list[tuple[str, int, dict[str, Any] | None]] = [
    ("plain PEFT", 1, None),
    ("one rank", 1, {"plan_one_stage": True}),
    ("2 stages", 2, {"pipeline": "1f1b"}),
    ("shards", 2, _SHARDS),
]
_LEARNT = 400  # steps
_SEEDS = 3


@dataclass(frozen=True, slots=True)
class Taken:
    """By one rank; predicted: None where nothing is planned."""

    peak: int
    cpu_s: float
    update_s: float
    predicted_peak: int | None = None
    predicted_s: float | None = None


def _own_part(batch: tuple[Tensor, Tensor], ranks: int) -> tuple[Tensor, Tensor]:
    """The samples of this replica."""
    x, y = (part.chunk(ranks)[dist.get_rank()] for part in batch)
    return x, y


class _Plain:
    """A plain loop over microbatches, or FSDP2 with them."""

    def __init__(self, task: Task, *, ranks: int):
        self.model: Layered = task.build()
        self._loss = task.loss
        batch = task.batch() if ranks == 1 else _own_part(task.batch(), ranks)
        self._parts = [part.chunk(_MICROBATCHES) for part in batch]
        if ranks > 1:
            mesh = init_device_mesh("cpu", (ranks,))
            for layer in self.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def step(self) -> None:
        self.model.zero_grad(set_to_none=True)
        for x, y in zip(*self._parts, strict=True):
            (self._loss(self.model(x), y) / _MICROBATCHES).backward()


def _taken(task: Task, settings: dict[str, Any] | None) -> Taken:
    torch.set_num_threads(1)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    task_batch = task.batch()
    with HeapBytes() as heap:
        if settings is None:
            runner: Any = _Plain(task, ranks=ranks)
            parameters = runner.model.parameters()
        else:
            if "sharded_data_parallel_degree" in settings:
                task = replace(task, batch=lambda: _own_part(task_batch, ranks))
            runner = Ours(task, task.build(), {**_SETTINGS, **settings})
            parameters = runner.model.local_parameters()
        optimizer = torch.optim.AdamW(parameters)
        if settings is not None and "optimizer_state" in settings:
            optimizer = sw.DistributedOptimizer(optimizer)
        times, updates = [], []
        runner.step()
        optimizer.step()
        with heap.counted():
            for _ in range(_STEPS):
                begun_s = time.process_time()
                runner.step()
                updates_s = time.process_time()
                optimizer.step()
                times.append(time.process_time() - begun_s)
                updates.append(time.process_time() - updates_s)
    if settings is None or runner.context.plan is None or runner.plan.prediction is None:
        return Taken(heap.peak, min(times), min(updates))
    of_rank = runner.plan.prediction.memory[min(runner.context.rank, len(runner.plan.prediction.memory) - 1)]
    return Taken(heap.peak, min(times), min(updates), of_rank.peak_bytes, runner.plan.prediction.step_s)


def large_vocabularies(options: Any) -> Section:
    """All runs with each vocabulary."""
    figures: dict[str, Any] = {}
    checks = []
    for words in (8_000,) if options.quick else (32_000, 128_000):
        task = gpt(layers=4, width=256, vocab=words, length=256, batch=8, name=f"{words} words")
        rows = [["", "peak, MiB", "of the plain loop", "predicted", "CPU s", "of the plain loop"]]
        found: dict[str, Taken] = {}
        for name, ranks, settings in _RUNS[:3] if options.quick else _RUNS:
            # Of a pair, the rank that takes most: of stages, the one with the head.
            taken = max(run_ranks(_taken, ranks, task, settings, timeout_s=600), key=lambda it: it.peak)
            found[name] = taken
            plain = found["plain loop" if ranks == 1 or "stages" in name else "FSDP2"]
            predicted = "" if taken.predicted_peak is None else f"{taken.predicted_peak / 2**20:.0f}"
            rows.append(
                [
                    name,
                    f"{taken.peak / 2**20:.0f}",
                    f"{taken.peak / plain.peak:.2f}",
                    predicted,
                    f"{taken.cpu_s:.2f}",
                    f"{taken.cpu_s / plain.cpu_s:.2f}",
                ]
            )
            print(" | ".join(rows[-1]), flush=True)
        figures[f"GPT 4 x 256, {words} words, 8 x 256 tokens in {_MICROBATCHES} microbatches"] = rows
        auto, plain = found["loss_chunks: auto"], found["plain loop"]
        peak, cpu_s = auto.peak / plain.peak, auto.cpu_s / plain.cpu_s
        checks.append(Check(section="S", what=f"peak in pieces, {words} words", value=peak, target=0.6))
        checks.append(Check(section="S", what=f"time in pieces, {words} words", value=cpu_s, target=1.05))
        if auto.predicted_peak is not None:
            error = abs(auto.predicted_peak / auto.peak - 1)
            what = f"predicted peak, {words} words"
            checks.append(Check(section="S", what=what, value=error, target=0.05, percent=True))
    return figures, checks


def _learnt(kind: str, steps: int, seed: int) -> float:
    """The loss of the last eighth of a training on the bytes of this repository's pages."""
    torch.set_num_threads(1)
    text = b"".join(page.read_bytes() for page in sorted(_PAGES.glob("*.md")))
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    task = gpt(layers=4, width=128, vocab=256, length=64)
    sw.init({"run_dir": "off", "log_interval": 10**6, "optimizer_state": kind, "seed": seed})
    model = sw.DistributedModel(task.build())
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=2e-3))

    @sw.step
    def train_step(model: sw.DistributedModel, x: Tensor, y: Tensor) -> Tensor:
        loss = task.loss(model(x), y)
        model.backward(loss)
        return loss

    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        starts = torch.randint(0, len(ids) - 65, (8,), generator=generator)
        rows = torch.stack([ids[start : start + 65] for start in starts.tolist()])
        optimizer.zero_grad()
        losses.append(float(train_step(model, rows[:, :-1], rows[:, 1:]).reduce_mean()))
        optimizer.step()
    last = losses[-steps // 8 :]
    return sum(last) / len(last)


def smaller_moments(options: Any) -> Section:
    """AdamW with moments in float32, bfloat16 and 8 bits: memory, time, and what is learnt."""
    task = gpt(layers=4, width=512, vocab=8_000, length=128, batch=4)
    rows = [["", "peak, MiB", "predicted", "CPU s", "update, CPU s"]]
    found: dict[str, Taken] = {}
    for name, ranks, settings in _MOMENTS[:4] if options.quick else _MOMENTS:
        taken = max(run_ranks(_taken, ranks, task, settings, timeout_s=600), key=lambda it: it.peak)
        found[name] = taken
        predicted = "" if taken.predicted_peak is None else f"{taken.predicted_peak / 2**20:.0f}"
        cells = [f"{taken.peak / 2**20:.0f}", predicted, f"{taken.cpu_s:.2f}", f"{taken.update_s:.3f}"]
        rows.append([name, *cells])
        print(" | ".join(rows[-1]), flush=True)
    checks = []
    for kind in ("as_is", "bf16", "8bit"):
        of_kind = found[kind]
        assert of_kind.predicted_peak is not None
        error = abs(of_kind.predicted_peak / of_kind.peak - 1)
        checks.append(
            Check(section="M", what=f"predicted peak, {kind}", value=error, target=0.05, percent=True)
        )
    losses = [["", *(f"seed {seed}" for seed in range(1, _SEEDS + 1))]]
    for kind in ("as_is", "bf16", "8bit"):
        of_seeds = [
            run_ranks(_learnt, 1, kind, 40 if options.quick else _LEARNT, seed, timeout_s=600)[0]
            for seed in range(1, _SEEDS + 1)
        ]
        losses.append([kind, *(f"{loss:.3f}" for loss in of_seeds)])
        print(" | ".join(losses[-1]), flush=True)
    figures = {
        f"{task.name}, 8,000 words, 4 x 128 tokens in {_MICROBATCHES} microbatches": rows,
        f"loss of the last eighth of {_LEARNT} steps, GPT 4 x 128 on bytes": losses,
    }
    return figures, checks


def adapters(options: Any) -> Section:
    """LoRA beside frozen weights, by PEFT alone and on ranks; the last row trains all weights."""
    task = gpt(layers=4, width=512, vocab=8_000, length=128, batch=4)
    lora = with_adapters(task)
    rows = [["", "peak, MiB", "predicted", "CPU s", "of plain PEFT"]]
    found: dict[str, Taken] = {}
    all_weights = ("one rank, all weights", 1, {"plan_one_stage": True})
    for name, ranks, settings in _ADAPTERS[:2] if options.quick else [*_ADAPTERS, all_weights]:
        trained = task if name == all_weights[0] else lora
        taken = max(run_ranks(_taken, ranks, trained, settings, timeout_s=600), key=lambda it: it.peak)
        found[name] = taken
        predicted = "" if taken.predicted_peak is None else f"{taken.predicted_peak / 2**20:.0f}"
        share = f"{taken.cpu_s / found['plain PEFT'].cpu_s:.2f}"
        rows.append([name, f"{taken.peak / 2**20:.0f}", predicted, f"{taken.cpu_s:.2f}", share])
        print(" | ".join(rows[-1]), flush=True)
    ours, plain = found["one rank"], found["plain PEFT"]
    checks = [
        Check(section="L", what="peak, of plain PEFT", value=ours.peak / plain.peak, target=1.05),
        Check(section="L", what="CPU s, of plain PEFT", value=ours.cpu_s / plain.cpu_s, target=1.05),
    ]
    return {f"{task.name}, 8,000 words, 4 x 128 tokens in {_MICROBATCHES} microbatches": rows}, checks


_SECTIONS = {
    "large vocabularies": large_vocabularies,
    "smaller moments": smaller_moments,
    "adapters": adapters,
}


def main() -> int:
    """Runs what is asked for."""
    parser = parser_for(__doc__, quick="one small vocabulary, one rank")
    parser.add_argument("--only", choices=_SECTIONS)
    options = parser.parse_args()
    return run_sections(
        options,
        _SECTIONS,
        shown=lambda rows: "\n".join("  ".join(f"{cell:<18}" for cell in row) for row in rows),
    )


if __name__ == "__main__":
    sys.exit(main())
