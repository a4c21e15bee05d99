"""Names of settings: our own, those of SageMaker's model parallel library, and what they mean here.

Dictionaries in the style of that library are accepted: ``partitions``, ``partition_file``, and ``-`` for
``_``. Settings of that library that change nothing here end up in `Config.ignored`. Settings for features
that this version lacks are accepted at their defaults only.
"""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from shardwright.errors import ConfigError
from shardwright.text import printable, shown

_RENAMED = {"partitions": "pipeline_parallel_degree"}

# Accepted with any value, because they change nothing here.
_WITHOUT_EFFECT = frozenset(
    {
        "_fp32_grad_accumulation",
        "_match_weights",
        "checkpoint_attentions",
        "contiguous",
        "deterministic_server",
        "fast_mode",
        "fork",
        "horovod",  # replicas are averaged here, so that a script's own average of them changes nothing
        "overlapping_allreduce",
        "sdp_reduce_bucket_size",  # an eighth of the sharded elements, and 5 million at most
        "sdp_hierarchical_allgather",
        "skip_tracing",
        "static_mode",
        "xla",
    }
)

# Read as values of other settings.
_TURNED = ("ddp", "load_partition", "partition_file")

# Features of later versions: the value that means "off", and what to use instead.
_NOT_YET: dict[str, tuple[Any, str]] = {
    "delayed_parameter_initialization": (
        False,
        "build the model under sw.delay_param_initialization()",
    ),
    "fp16_params": (False, "cast the model with model.half()"),
    "prescaled_batch": (False, "give each replica its own batch"),
}


def dictionary_of(layer: Any) -> dict[Any, Any]:
    if layer is not None and not isinstance(layer, Mapping):
        raise ConfigError(
            f"the settings are {shown(layer)}, but they must be a dictionary such as {{'microbatches': 4}}."
        )
    return dict(layer or {})


def ignored_names(given: Any) -> list[str]:
    if given is not None and not isinstance(given, list | tuple):
        raise ConfigError(f"ignored is {shown(given)}, but it must be a list of names of settings.")
    return [printable(str(name)) for name in given or ()]


def canonical(
    given: Mapping[str, Any], *, known: Collection[str], problems: list[str], ignored: list[str]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for raw_key, value in given.items():
        key = str(raw_key).replace("-", "_")
        if key in _WITHOUT_EFFECT:
            ignored.append(key)
        elif key in _NOT_YET:
            if value is not None and not _same(value, _NOT_YET[key][0]):
                problems.append(_not_yet(key, value))
        elif (name := _RENAMED.get(key, key)) in found and not _same(found[name], value):
            problems.append(
                f"{origin[name]} is {shown(found[name])}, but {printable(str(raw_key))} is {shown(value)}: "
                "they are two names of one setting. Give one of them."
            )
        elif name in known or key in _TURNED:
            found[name], origin[name] = value, str(raw_key)
        else:
            problems.append(_unknown(str(raw_key), key, known))
    _plan_file(found, problems)
    _replicas(found, problems)
    return found


def _replicas(found: dict[str, Any], problems: list[str]) -> None:
    """Turns `ddp` into `data_parallel_degree`: false asks for one replica, and true for nothing."""
    ddp = found.pop("ddp", None)
    if ddp is None:
        return
    degree = found.get("data_parallel_degree")
    if _same(ddp, True):
        return
    if not _same(ddp, False):
        problems.append(f"ddp is {shown(ddp)}, but it must be true or false.")
    elif degree is not None and not _same(degree, 1):
        problems.append(
            f"ddp is false, but data_parallel_degree is {shown(degree)}. "
            "Remove ddp, or set data_parallel_degree 1."
        )
    else:
        found["data_parallel_degree"] = 1


def _plan_file(found: dict[str, Any], problems: list[str]) -> None:
    """Turns `load_partition` and `partition_file` into `plan`."""
    load, file = found.pop("load_partition", None), found.pop("partition_file", None)
    wanted = None if load is None else not _same(load, False)
    plan = found.get("plan")
    if file is not None and plan is not None and not _same(file, plan):
        problems.append(
            f"partition_file is {shown(file)}, but plan is {shown(plan)}: they are two names of one setting."
        )
    elif wanted is True and file is None and plan is None:
        problems.append("load_partition is true, but no file is given. Set plan to the path of a plan file.")
    elif wanted is False and (file is not None or plan is not None):
        key = "partition_file" if file is not None else "plan"
        problems.append(
            f"load_partition is false, but {key} is {shown(file or plan)}. Remove one of the two."
        )
    elif file is not None:
        found["plan"] = file


def _same(a: Any, b: Any) -> bool:
    """Equal, also where one came as text from a command line."""
    return bool(a == b) or shown(a).strip("'").lower() == shown(b).strip("'").lower()


def _unknown(raw_key: str, key: str, known: Collection[str]) -> str:
    names = [*known, *_RENAMED, *_NOT_YET, *_WITHOUT_EFFECT, *_TURNED]
    close = get_close_matches(key, names, n=1, cutoff=0.6)
    advice = _advice_for(key.lower()) or (f"Did you mean {close[0]}?" if close else "Remove it.")
    return f"{printable(raw_key)} is not a setting. {advice}"


def _not_yet(key: str, value: Any) -> str:
    off, instead = _NOT_YET[key]
    only = f"this version does not have it yet (only {off!r})"
    return f"{key} is {shown(value)}, but {only}. Remove it, or {instead}."


_BATCH = "Remove it: the script makes the batch; microbatches says into how many parts it is cut."
_STEPS = "Remove it: call optimizer.step() after as many steps, as in one process."
_ORDINARY = "Remove it, and write it in the script as for one process."
_PRECISION = (
    "Set bf16 or fp16 to true for parameters of that type, or use torch.autocast in the step function."
)
_SHARDED = (
    "Set sharded_data_parallel_degree to the ranks that share parameters, or, for ZeRO-1, "
    "shard_optimizer_state."
)
_RANKS = "Remove it: the launcher starts ranks (shardwright run -n 4, or torchrun)."
_DEVICES = "Remove it: each rank takes the accelerator of its local rank (sw.device())."
_QUANTIZED = "Remove it: gradients and rows go between hosts as they are; bf16: true halves them."
_CALIBRATE = "Remove it: runs keep their plan, and correct no predictions; plan: anew plans anew."
_ANEW = "Set plan to anew."
_STALL = "Remove it: ranks that wait are named after a thirtieth of timeout_s."
_HEAP = "Remove it: on CPUs, freed memory is kept for the next step."
_REDUCE = (
    "Remove it: gradients are reduced in each microbatch where memory_limit requires it; "
    "reduce_every_microbatch in a plan file demands it."
)
_OFFLOAD_DIR = "Set the environment variable TMPDIR to a folder on a disk."
_OLDER = "Call sw.Checkpoints(...).resume(allow_older=True), or remove the damaged checkpoint's folder."
_STATISTICS = "Set microbatches to 1: batch norms then see the whole batch."
_TRACKERS = "Set trackers to tensorboard."
_SEQUENCES = "Remove it: sequences are cut along dimension 1. Transpose inside the model, not before it."
_CORES = "Remove it: ranks on CPUs have their own cores during a step, if there are enough (else: taskset)."
_UNUSED = "Remove it: unused parameters need nothing here."
_RESUME = (
    "Remove it: sw.Checkpoints(...).resume() goes on from checkpoints, as shardwright run --resume does."
)

_DEGREES = {
    "context_parallel_degree": ("cp", "cp_size", "context_parallel"),
    "data_parallel_degree": ("dp", "dp_size", "replicas", "num_replicas"),
    "expert_parallel_degree": ("ep", "ep_size", "expert_parallel"),
    "pipeline_parallel_degree": ("pp", "pp_size", "num_stages", "stages", "split_points"),
    "tensor_parallel_degree": ("tp", "tp_size", "tp_degree"),
}
_SETTINGS = {
    "activation_checkpointing": ("recompute", "recomputation", "gradient_checkpointing", "checkpointing"),
    "microbatches": ("chunks", "num_chunks", "micro_batches", "num_microbatches", "n_microbatches"),
    "offload_activations": ("cpu_offload", "activation_offload"),
    "pipeline": ("schedule", "pipeline_schedule", "pipeline_parallel_schedule"),
    "memory_limit": ("max_memory", "memory_budget"),
    "log_interval": ("log_level", "verbose", "logging_steps"),
    "run_dir": ("output_dir", "log_dir", "checkpoint_dir", "save_dir"),
}
_ADVICE = {
    _BATCH: ("batch_size", "micro_batch_size", "train_batch_size", "global_batch_size"),
    _STEPS: ("gradient_accumulation_steps",),
    _PRECISION: ("amp", "dtype", "mixed_precision", "precision"),
    _SHARDED: ("fsdp", "shard", "sharding_strategy", "zero", "zero_optimization", "zero_stage"),
    _RANKS: ("nnodes", "nproc_per_node", "num_processes", "world_size"),
    _DEVICES: ("device", "devices", "gpus", "num_gpus"),
    _ORDINARY: ("clip_grad", "gradient_clipping", "max_grad_norm", "learning_rate", "lr"),
    _CALIBRATE: ("calibrate",),
    _ANEW: ("plan_anew",),
    _STALL: ("missing_ranks_s",),
    _HEAP: ("keep_freed_memory",),
    _REDUCE: ("sdp_reduce_every_microbatch",),
    _OFFLOAD_DIR: ("offload_dir",),
    _OLDER: ("allow_older",),
    _QUANTIZED: ("sdp_quantized_gradients", "sdp_quantized_parameters"),
    _STATISTICS: ("batch_statistics",),
    _TRACKERS: ("tensorboard",),
    _SEQUENCES: ("sequence_dim",),
    _CORES: ("pin_cores",),
    _UNUSED: ("find_unused_parameters",),
    _RESUME: ("resume", "resume_from_checkpoint"),
}

_WORDS = {word: f"Did you mean {ours}?" for ours, words in _SETTINGS.items() for word in words}
_WORDS |= {word: f"Did you mean {ours}?" for ours, words in _DEGREES.items() for word in words}
_WORDS |= {word: advice for advice, words in _ADVICE.items() for word in words}


def _advice_for(word: str) -> str | None:
    """What to do in place of a setting of that name; None where we know of none.

    >>> _advice_for("schedule")
    'Did you mean pipeline?'
    """
    return _WORDS.get(word)
