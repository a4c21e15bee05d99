"""Published memory against the formulas: Megatron's states, and activations with and without recomputing."""

from collections.abc import Sequence
from typing import Any

from fit import MeasuredRun
from shardwright.cluster import parse_inventory
from shardwright.cluster.cluster_file import usable_bytes
from shardwright.costs.block import kept_bytes
from shardwright.costs.inputs import Options, Recompute, ScheduleKind
from shardwright.costs.memory import BF16, in_flight, rank_bytes, state_bytes
from shardwright.costs.shape import Shape

__all__ = ["layout_shares", "memory_ratios"]

_MODES = {
    # name: (sequence parallel, recomputation)
    "none": (0, Recompute.NONE),
    "seq": (1, Recompute.NONE),
    "sel": (0, Recompute.SELECTIVE),
    "seqsel": (1, Recompute.SELECTIVE),
    "full": (0, Recompute.FULL),
}
_VOCABULARY = 51200


def memory_ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Worked out / published, by model and what is kept."""
    found = {}
    for row in rows:
        name = f"{row['model']}, {row['mode']}"
        shape, options = _shape(row), _options(row, row["mode"])
        if "par_opt_gib" in row:
            states = state_bytes(shape.layers * shape.block_parameters, options, BF16)
            of_rank = sum(states) / (options.tensor * options.pipeline)
            found[f"{name}: states"] = float(of_rank / row["par_opt_gib"] / 2**30)
            blocks = shape.layers / options.pipeline
            kept = blocks * in_flight(options) * kept_bytes(shape, options)
            found[f"{name}: activations"] = float(kept / row["act_gib"] / 2**30)
        if "act_pct_of_tp_baseline" in row:
            baseline = kept_bytes(shape, _options(row, "none"))
            share = kept_bytes(shape, options) / baseline
            found[f"{name}: share"] = float(100 * share / row["act_pct_of_tp_baseline"])
    return found


def layout_shares(runs: Sequence[MeasuredRun]) -> dict[str, float]:
    """Bytes of runs in 80 GB / those that a search leaves of such an accelerator."""
    ((kind, _),) = parse_inventory("dgx-h100").nodes
    return {
        run.name: float(rank_bytes(run.shape, run.options, precision=run.precision).total)
        / usable_bytes(kind)
        for run in runs
    }


def _shape(row: dict[str, Any]) -> Shape:
    hidden, heads = row["hidden"], row["heads"]
    return Shape(
        layers=row["layers"],
        hidden=hidden,
        heads=heads,
        head_width=hidden / heads,
        key_heads=heads,
        ffn=4 * hidden,
        vocabulary=_VOCABULARY,
        sequence=row["seq"],
    )


def _options(row: dict[str, Any], mode: str) -> Options:
    sequence_parallel, recompute = _MODES[mode]
    virtual = row.get("virtual_stages") or 1
    return Options(
        tensor=row["tp"],
        pipeline=row["pp"],
        virtual=virtual,
        microbatch=row["micro_batch"],
        microbatches=1024,
        schedule=ScheduleKind.INTERLEAVED if virtual > 1 else ScheduleKind.ONE_F_ONE_B,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
        flash=0,
    )
