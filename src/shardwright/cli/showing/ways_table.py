"""Ways to train as a table in the field's words, as wide as the terminal."""

import shutil
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shardwright.costs import Offload, Recompute
from shardwright.quantities import format_bytes, format_seconds
from shardwright.text import align

if TYPE_CHECKING:
    from shardwright.planner.ways import Task, Way

__all__ = ["ways_table"]

_USUAL = frozenset({"1", "0", "none"})
_LEFT_OUT_FIRST = ("TFLOP/s/GPU", "tok/s/GPU", "samples/s/GPU", "schedule", "recompute", "offload")
_GAP = 2


def ways_table(task: "Task", ways: Sequence["Way"], *, width: int | None = None) -> str:
    """A row for each way.

    Degrees are those of a rank's groups: tensor (TP), pipeline (PP), stages of a rank (VP), context (CP),
    experts (EP), replicas (DP). ``mbs`` is a microbatch's samples, ``m`` the number of microbatches. A star
    marks what this version does not run.
    """
    width = shutil.get_terminal_size().columns if width is None else width
    columns = [[title, *(cell(way) for way in ways)] for title, cell in _columns(task, ways[0]).items()]
    usual = [column for column in columns if set(column[1:]) <= _USUAL]
    known = {column[0]: column for column in columns}
    for column in [*usual, *(known[name] for name in _LEFT_OUT_FIRST if name in known)]:
        if _width(columns) <= width:
            break
        columns = [each for each in columns if each is not column]
    return align(list(zip(*columns, strict=True)))


def _width(columns: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, column)) for column in columns) + _GAP * (len(columns) - 1)


def _columns(task: "Task", best: "Way") -> dict[str, Callable[["Way"], str]]:
    def degree(name: str) -> Callable[["Way"], str]:
        return lambda way: str(int(getattr(way.options, name)))

    ranks, unit = task.machines.num_ranks, "tok" if task.unit == "tokens" else task.unit
    each = "core" if any(kind.cores for kind, _ in task.machines.nodes) else "GPU"
    return {
        "": lambda way: "*" if way.not_run_yet else "",
        "TP": degree("tensor"),
        "PP": degree("pipeline"),
        "VP": degree("virtual"),
        "CP": degree("context"),
        "EP": degree("expert"),
        "DP": degree("data"),
        "ZeRO": _zero,
        "mbs": degree("microbatch"),
        "m": degree("microbatches"),
        "schedule": lambda way: way.schedule if way.options.pipeline > 1 else "none",
        "recompute": _recomputed,
        "offload": lambda way: Offload(int(way.options.offload)).name.lower().replace("nothing", "none"),
        "memory": lambda way: format_bytes(way.peak_bytes),
        "step": lambda way: format_seconds(way.step_s),
        "apart": lambda way: "" if way is best else f"{way.step_s / best.step_s - 1:+.1%}",
        f"{unit}/s/{each}": lambda way: f"{way.tokens_per_s / ranks:,.0f}",
        f"TFLOP/s/{each}": lambda way: f"{way.flops_per_s / 1e12:.3g}",
        "MFU": lambda way: f"{way.mfu:.0%}",
    }


def _recomputed(way: "Way") -> str:
    """What is recomputed; of full recomputation, the layers of a rank that are exempt."""
    kept = int(way.options.kept_layers)
    return f"all but {kept}" if kept else Recompute(int(way.options.recompute)).name.lower()


def _zero(way: "Way") -> str:
    """The stage of ZeRO, with its group where that is not all replicas."""
    stage, shard = int(way.options.sharded), int(way.options.shard)
    return f"{stage} over {shard}" if stage and shard != way.options.data else str(stage)
