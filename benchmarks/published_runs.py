"""Published runs as the costs of a step understand them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fit import MeasuredRun
from shardwright.catalogue import Transformer, find_architecture, from_hugging_face
from shardwright.cluster import parse_inventory
from shardwright.costs.calibration import ways_of
from shardwright.costs.inputs import (
    FLOAT8,
    Dispatch,
    Hides,
    Options,
    Rates,
    Recompute,
    ScheduleKind,
    Sharded,
)
from shardwright.costs.memory import Precision
from shardwright.costs.shape import Shape

__all__ = ["family", "measured_run", "recipe_runs", "runtime", "why_not"]

Row = dict[str, Any]

_MEMORY_BPS = {"A100-80GB": 2.04e12, "A100-40GB": 1.56e12, "H100-80GB": 3.35e12, "V100-32GB": 0.9e12}
_PEAK = {"A100": 312e12, "H100": 989e12, "V100": 125e12}
_SCHEDULES = {
    "1f1b": ScheduleKind.ONE_F_ONE_B,
    "interleaved-1f1b": ScheduleKind.INTERLEAVED,
    "interleaved-1f1b (flexible)": ScheduleKind.INTERLEAVED,
    "1f1b-i": ScheduleKind.INTERLEAVED,
    "zb-1p": ScheduleKind.ZB_H1,
    "zb-2p": ScheduleKind.ZB_H2,
}
_NETWORK = {"A100": 100, "H100": 400, "V100": 12.5}  # GB/s of a node, where a row does not say
_NEEDED = ("layers", "hidden", "heads", "seq", "gpus")
_MOST_VIRTUAL = 8
_YEARS = {"mcore_h100_weak": 2024, "megascale": 2024, "nanotron_best": 2025}
"""Of publications since 2024 whose dtype is stated."""
_THREE_DEGREES = frozenset({"megatron", "nanotron"})
_SEQUENCE_PARALLEL = frozenset({"megascale", "mcore_h100_weak", "nanotron_best"})
# Gradients of weights hide sums in Megatron since 2022, and in nanotron ("tp_linear_async_communication");
# "TP comm overlap" of Megatron-Core hides more, as MegaScale does (arXiv:2402.15627, 3.2).
_HIDES_BACKWARD = frozenset({"korthikanti_t5", "zero_bubble", "megascale", "nanotron_best"})
_UNTIED = frozenset({"Llama-like 8.86B", "Llama-like 80.0B"})  # by nanotron's scripts/scaling_benchmarks.py
_BALANCED = frozenset({"zero_bubble", "nanotron_best"})
_FUSED_ATTENTION = frozenset({"llmfoundry_fsdp", "mcore_h100_weak", "nanotron_best"})


def family(row: Row) -> str:
    """Of the accelerators: ``A100`` for both sizes of it."""
    return str(row["gpu"]).split("-")[0]


def runtime(row: Row) -> str | None:
    """What ran it; None where the publication does not say, or it is one of its kind."""
    group, source, model = row["group"], row["source"], row["model"]
    if group == "ptdp_t2":
        # ZeRO-3 of 2021 gathered over the network at a fifth of the rate of ZeRO-3 of 2022.
        return "deepspeed-2021" if row["zero_stage"] == Sharded.PARAMETERS else "megatron"
    if group == "megascale":
        return "megatron" if "Megatron" in model else "megascale"
    if group == "production":
        return {"MT-NLG 530B": "megatron", "BLOOM-176B": "megatron"}.get(model) or (
            "llama3" if source.startswith("Llama 3") else None
        )
    known = {
        "korthikanti_t5": "megatron",
        "zero_bubble": "megatron",
        "seed": "smp",
        "smp_mics": "smp",
        "llmfoundry_fsdp": "fsdp",
        "bmtrain_v100": "bmtrain",
        "ds_azure_zero3": "deepspeed",
        "mcore_h100_weak": "megatron",
        "mcore_h100_strong": "megatron",
        "nanotron_best": "nanotron",
    }
    return known.get(group)


def why_not(row: Row) -> str | None:
    """Why a row is not used; None where it is."""
    if family(row) not in _PEAK:
        return "no accelerator that is calibrated"
    if row["gpu"] not in _MEMORY_BPS:
        return "no accelerator that is calibrated"
    if runtime(row) is None:
        return "runtime not known"
    if any(row.get(key) is None for key in _NEEDED):
        return "shape not published"
    if row.get("global_batch") is None:
        return "batch not published"
    if runtime(row) in _THREE_DEGREES and row["tp"] is None:
        return "degrees not published"
    if row["provenance"].startswith("recalled"):
        return "recalled, not read"
    if _step_s(row) is None:
        return "neither time nor throughput"
    return None


def measured_run(row: Row) -> MeasuredRun:
    """A row that `why_not` has nothing against."""
    step_s = _step_s(row)
    assert step_s is not None
    return MeasuredRun(
        name="{model}, {gpus} x {gpu}, {seq} tokens, batch {global_batch}".format(**row),
        group=row["group"],
        accelerator=family(row),
        runtime=str(runtime(row)),
        year=_YEARS.get(row["group"]),
        dtype=row["dtype"],
        shape=_shape(row),
        options=_options(row),
        rates=_rates(row),
        step_s=step_s,
    )


def recipe_runs(document: Mapping[str, Any]) -> list[MeasuredRun]:
    """The runs of published recipes, all on the machines that each table names."""
    return [
        _recipe_run(dict(zip(table["columns"], row, strict=True)), table, document["models"])
        for table in document["tables"]
        for row in table["rows"]
    ]


def _recipe_run(row: Row, table: Row, models: Mapping[str, Any]) -> MeasuredRun:
    name, at, network = table["machines"].partition("@")
    machines = parse_inventory(f"{name}*{-(-row['gpus'] // 8)}{at}{network}")
    kind, _ = machines.nodes[0]
    rates = Rates.of(machines, table["dtype"])
    if "memory_GBps" in table:
        rates = replace(rates, memory_Bps=table["memory_GBps"] * 1e9)
    shape = Shape.of(_architecture(row["model"], models), sequence=row["sequence"])
    if table.get("routing") == "neighbours":
        shape = replace(shape, expert_groups=shape.experts / shape.experts_per_token, groups_per_token=1)
    data = row["gpus"] // (row["tensor"] * row["pipeline"] * row["context"])
    each = row["batch"] / data
    shard = row.get("shard", data * row["context"])
    return MeasuredRun(
        name="{model}, {gpus} GPUs, {sequence} tokens, batch {batch}".format(**row)
        + f", {table['dtype']}{', async' if row.get('hides') == 'chunks' else ''}",
        group=table["group"],
        accelerator=kind.accelerator.family,
        runtime=table["runtime"],
        year=table["year"],
        dtype=table["dtype"],
        precision=Precision(*table.get("state_bytes", (2, 2, 12))),
        shape=shape,
        options=Options(
            **{name: row[name] for name in ("tensor", "pipeline", "virtual", "context")},
            # Megatron counts tensor parallel ranks among those that share experts.
            expert=max(1, row["expert"] // row["tensor"]),
            data=data,
            shard=shard if table["zero"] else 1,
            sharded=table["zero"],
            microbatch=row["microbatch"],
            microbatches=max(1.0, each / row["microbatch"]),
            schedule=ScheduleKind.INTERLEAVED if row["virtual"] > 1 else ScheduleKind.ONE_F_ONE_B,
            sequence_parallel=1,
            hides_sums=int(Hides[row.get("hides", table.get("hides", "nothing")).upper()]),
            dispatch=int(Dispatch[row.get("dispatch", "node").upper()]),
            recompute=Recompute[row.get("recompute", "none").upper()],
            kept_layers=row.get("kept", 0) * shape.layers / row["pipeline"],
            float8=int(table["dtype"] == FLOAT8),
            fused=1,
            stops_early=ways_of(table["runtime"])["stops_early"],
        ),
        rates=rates,
        step_s=row["batch"] * row["sequence"] / row["gpus"] / row["tokens"],
    )


def _architecture(name: str, models: Mapping[str, Any]) -> Transformer:
    return from_hugging_face(models[name], name=name) if name in models else find_architecture(name)


def _shape(row: Row) -> Shape:
    hidden, heads = row["hidden"], row["heads"]
    return Shape(
        layers=row["layers"],
        hidden=hidden,
        heads=heads,
        head_width=hidden / heads,
        key_heads=row.get("kv_heads") or heads,
        ffn=row.get("ffn") or 4 * hidden,
        gated=1.0 if row.get("gated_mlp") else 0.0,
        vocabulary=row["vocab"] or 50257,
        tied=0.0 if row["model"] in _UNTIED else 1.0,
        sequence=row["seq"],
    )


def _options(row: Row) -> Options:
    tensor, pipeline = row["tp"] or 1, row["pp"] or 1
    data = row["dp"] or row["gpus"] // (tensor * pipeline)
    each = row["global_batch"] / data
    # Where the microbatch is not published, the batch of a replica is one; Megatron-Core's have one sample.
    microbatch = row["micro_batch"] or (1 if row["group"] == "mcore_h100_weak" else each)
    stage = row.get("zero_stage", Sharded.PARAMETERS if runtime(row) == "smp" else None) or (
        # "overlap-param-gather" is of the distributed optimizer.
        Sharded.OPTIMIZER if row["group"] == "mcore_h100_weak" else 0
    )
    recompute, schedule = str(row["recompute"]), str(row["schedule"]).lower()
    virtual = row["virtual_stages"] or 1
    kind = _SCHEDULES.get(schedule.split(" (inter")[0], ScheduleKind.ONE_F_ONE_B)
    if row["group"] == "zero_bubble" and kind == ScheduleKind.INTERLEAVED:
        virtual = (row["layers"] + 2) / pipeline  # "1F1B-I uses max chunks (1 layer per chunk)"
    if row["group"] == "mcore_h100_weak" and pipeline > 1:  # interleaved, in how many chunks is not stated
        virtual = max(v for v in range(1, _MOST_VIRTUAL + 1) if row["layers"] / pipeline % v == 0)
    return Options(
        tensor=tensor,
        pipeline=pipeline,
        virtual=virtual,
        data=data,
        shard=(row["sdp_degree"] or data) if stage else 1,
        sharded=stage,
        microbatch=microbatch,
        microbatches=max(1.0, each / microbatch),
        schedule=ScheduleKind.INTERLEAVED if virtual > 1 else kind,
        recompute=_recompute(row, recompute),
        sequence_parallel=1 if "+SP" in recompute or row["group"] in _SEQUENCE_PARALLEL else 0,
        hides_sums=_hides(row),
        flash=_flash(row),
        hierarchical=1 if row.get("collectives") == "smddp" else 0,
        whole_layers=0 if row["group"] in _BALANCED else 1,
        stops_early=ways_of(str(runtime(row)))["stops_early"],
    )


def _hides(row: Row) -> Hides:
    if row["group"] == "mcore_h100_weak" or runtime(row) == "megascale":
        return Hides.CHUNKS
    return Hides.BACKWARD if row["group"] in _HIDES_BACKWARD else Hides.NOTHING


def _recompute(row: Row, text: str) -> Recompute:
    if text.startswith("full"):
        return Recompute.FULL
    if text.startswith("selective"):
        return Recompute.SELECTIVE
    # Megatron of that time: "selective" was its way to train models of this size.
    return Recompute.SELECTIVE if text == "not stated" and runtime(row) == "megatron" else Recompute.NONE


def _flash(row: Row) -> int:
    if row["group"] in _FUSED_ATTENTION or runtime(row) in ("megascale", "llama3"):
        return 1
    # Of the 50B rows it is not stated; the 13B rows of the same page have it both ways.
    stated = row.get("flash_attention", False)
    return 1 if stated is None or stated else 0


def _rates(row: Row) -> Rates:
    return Rates(
        flops_per_s=(row.get("peak_tflops") or _PEAK[family(row)] / 1e12) * 1e12,
        memory_Bps=_MEMORY_BPS[row["gpu"]],
        link_Bps=row["intra_bw"] * 1e9,
        network_Bps=(row["inter_bw"] or _NETWORK[family(row)]) * 1e9,
        per_node=row["nodes_gpus_per_node"],
    )


def _step_s(row: Row) -> float | None:
    if row["group"] == "llmfoundry_fsdp" and row.get("tokens_per_s_gpu"):
        return float(row["global_batch"] * row["seq"] / row["gpus"] / row["tokens_per_s_gpu"])
    if row.get("iter_time_s"):
        return float(row["iter_time_s"])
    flops = _step_flops(row)
    if flops is None or not row.get("tflops_per_gpu"):
        return None
    return flops / row["gpus"] / row["tflops_per_gpu"] / 1e12


def _step_flops(row: Row) -> float | None:
    """What the publication counted for a step; None where it does not say how."""
    shape = _shape(row)
    tokens, layers, hidden = row["global_batch"] * row["seq"], shape.layers, shape.hidden
    if runtime(row) == "smp":
        # "AWS examples of that time print 8*N*tokens".
        tables = 1 if "Bloom" in row["model"] else 2
        return float(8 * (layers * shape.block_parameters + tables * shape.embedding_parameters) * tokens)
    if row["group"] == "ds_azure_zero3":  # 96Bslh^2(1+s/6h+V/16lh), as the hardware computes
        share = 1 + row["seq"] / 6 / hidden + shape.vocabulary / 16 / layers / hidden
        return float(96 * tokens * layers * hidden**2 * share)
    if row["group"] in ("mcore_h100_weak", "nanotron_best"):  # as the model needs, a causal mask in full
        products = layers * shape.block_parameters + shape.embedding_parameters
        return float(6 * tokens * (products + 2 * layers * row["seq"] * hidden))
    return None
