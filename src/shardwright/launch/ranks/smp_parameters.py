"""Reads the parameters of SageMaker's model parallel library, and checks them before any start.

They come as a dictionary, as the path of a JSON file (``"parameters": "smp.json"`` in an estimator's
``distribution``), as JSON text, or as ``partitions=2,microbatches=4`` (the form of ``--mp_parameters``).

It imports no framework: an estimator checks on a laptop what a rank would complain about an hour later.
"""

import json
import os
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeGuard, get_args

from shardwright.config import Config, PipelineKind
from shardwright.errors import ConfigError
from shardwright.files import DocumentError, UserFile, parse_json
from shardwright.problems import join
from shardwright.quantities import MOST_RANKS
from shardwright.text import printable, shown

_PIPELINES = ("simple", "interleaved", "_only_forward")
_OUR_PIPELINES = tuple(kind for kind in get_args(PipelineKind) if kind != "auto")
_BACKENDS = ("auto", "nccl", "gloo")

_COUNTS = (
    "partitions pipeline_parallel_degree tensor_parallel_degree sharded_data_parallel_degree microbatches "
    "active_microbatches"
).split()
_FLAGS = (
    "auto_partition contiguous load_partition horovod ddp deterministic_server offload_activations "
    "fp16_params fp16 bf16 shard_optimizer_state prescaled_batch"
).split()
# Any value is accepted: scripts pass them, and nobody has written down what they mean.
_ANY = (
    "xla fork skip_tracing activation_loading_horizon sdp_reduce_bucket_size "
    "sdp_param_persistence_threshold sdp_max_live_parameters sdp_hierarchical_allgather "
    "sdp_gradient_clipping delayed_parameter_initialization static_mode fast_mode checkpoint_attentions "
    "_match_weights _fp32_grad_accumulation overlapping_allreduce"
).split()
_OTHERS = (
    "pipeline optimize placement_strategy default_partition partition_file memory_weight ddp_port "
    "ddp_dist_backend"
).split()
_KNOWN = frozenset((*_COUNTS, *_FLAGS, *_ANY, *_OTHERS))
_DEGREES = (
    "partitions",
    "pipeline_parallel_degree",
    "tensor_parallel_degree",
    "sharded_data_parallel_degree",
)


def read_smp_parameters(given: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """Reads parameters from wherever they are.

    >>> read_smp_parameters("partitions=2,ddp=True,pipeline=simple")
    {'partitions': 2, 'ddp': True, 'pipeline': 'simple'}
    """
    if isinstance(given, Mapping):
        return {_plain(str(key)): value for key, value in given.items()}
    if not isinstance(given, str | os.PathLike):
        raise ConfigError(
            f"parameters of the model parallel library are a {type(given).__name__}, but they must be a "
            'dictionary such as {"partitions": 2, "microbatches": 4}, or the path of a JSON file.'
        )
    text = os.fspath(given).strip()
    if text.startswith("{"):
        return _from_json(text, f"parameters {shown(text)}")
    if "=" in text and not text.endswith(".json"):
        return _from_pairs(text)
    file = UserFile(text, what="parameters of the model parallel library:", error=ConfigError, advice=_GIVE)
    return _as_parameters(file.read_json(), str(file))


def encode_smp_parameters(parameters: Mapping[str, Any]) -> str:
    """Parameters as ``SM_HP_MP_PARAMETERS`` has them.

    ``partitions`` is among them wherever a degree is: by it other libraries know that a model is split.
    """
    named = dict(parameters)
    if any(named.get(key) is not None for key in _DEGREES) and named.get("partitions") is None:
        named["partitions"] = named.get("pipeline_parallel_degree") or 1
    try:
        return json.dumps(named, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"parameters of the model parallel library must be JSON, but {error}. Use numbers, text, true, "
            "false and null."
        ) from error


def check_smp_parameters(parameters: Mapping[str, Any], *, needs_degree: bool = False) -> tuple[str, ...]:
    """Checks parameters, all of them at once; returns remarks on those that nobody knows.

    >>> check_smp_parameters({"partitions": 2, "of_a_later_version": 4})
    ('of_a_later_version is not a parameter of the model parallel library, and is passed over.',)
    """
    given = {_plain(str(key)): value for key, value in parameters.items() if value is not None}
    problems = [
        *_wrong_counts(given),
        *_wrong_flags(given),
        *_wrong_choices(given),
        *_wrong_numbers(given),
        *_contradictions(given),
    ]
    known = sorted({*_KNOWN, *Config.model_fields})
    for key in (key for key in given if key not in known):
        if close := get_close_matches(key, known, n=1, cutoff=_SLIP):
            problems.append(f"{printable(key)} is not a parameter. Did you mean {close[0]}?")
    if needs_degree and not any(key in given for key in _DEGREES):
        problems.append(
            "partitions is missing: nothing says into how many stages the model is split. Add "
            '"partitions": 2 (or its other name, "pipeline_parallel_degree"); 1 for none.'
        )
    if problems:
        title = f"{len(problems)} parameters of the model parallel library cannot be used:"
        raise ConfigError(problems[0] if len(problems) == 1 else join(title, problems))
    return tuple(_unknown(key, known) for key in given if key not in known)


_SLIP = 0.85
"""So much alike, a name is another one with a slip of the pen, and not one of a later version."""


def check_world(parameters: Mapping[str, Any], *, num_hosts: int, processes_per_host: int) -> None:
    """Checks that the ranks can be divided as the degrees say."""
    stages = parameters.get("partitions") or parameters.get("pipeline_parallel_degree") or 1
    tensor = parameters.get("tensor_parallel_degree") or 1
    world = num_hosts * processes_per_host
    if world % (stages * tensor) == 0:
        return
    asked = f"partitions is {stages}"
    if tensor > 1:
        asked += f" and tensor_parallel_degree is {tensor}, together {stages * tensor}"
    raise ConfigError(
        f"{asked}, but instance_count({num_hosts}) * "
        f"processes_per_host({processes_per_host}) = {world} ranks, which is no multiple of it. Set "
        "processes_per_host in "
        f'"mpi": {{"enabled": True, "processes_per_host": {stages * tensor}}}, or change partitions.'
    )


def _plain(key: str) -> str:
    return key if key in _KNOWN else key.replace("-", "_")


_GIVE = "Give the path of a JSON file, or a dictionary"


def _from_json(text: str, where: str) -> dict[str, Any]:
    try:
        return _as_parameters(parse_json(text), where)
    except DocumentError as error:
        raise ConfigError(f"{where} {error.predicate}. Correct it.") from None


def _as_parameters(found: Any, where: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ConfigError(
            f"{where} has a {type(found).__name__} where parameters of the model parallel library must be an "
            'object, such as {"partitions": 2, "microbatches": 4}.'
        )
    return {_plain(key): value for key, value in found.items()}


def _from_pairs(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in text.split(","):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not key.replace("-", "_").isidentifier():
            raise ConfigError(
                f"{shown(pair)} in {shown(text)} is no parameter of the model parallel library. Write "
                "key=value pairs with commas between them: partitions=2,microbatches=4"
            )
        if found.setdefault(_plain(key), _value(value)) != _value(value):
            raise ConfigError(f"{_plain(key)} is given twice in {shown(text)}, with two values. Give one.")
    return found


def _value(text: str) -> Any:
    words: dict[str, Any] = {"True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    try:
        return parse_json(text)
    except DocumentError as error:
        if not error.is_other_text:
            raise ConfigError(f"{shown(text)} is no value of a parameter: {error}.") from None
        return text


def _is_count(value: Any, least: int = 1) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST_RANKS


def _wrong_counts(given: Mapping[str, Any]) -> list[str]:
    return [
        f"{key} is {shown(given[key])}, but it must be a whole number of at least 1, and at most "
        f"{MOST_RANKS}. For example: {key!r}: 2"
        for key in _COUNTS
        if key in given and not _is_count(given[key])
    ]


def _wrong_flags(given: Mapping[str, Any]) -> list[str]:
    return [
        f"{key} is {shown(given[key])}, but it must be True or False."
        for key in _FLAGS
        if key in given and not isinstance(given[key], bool)
    ]


def _wrong_choices(given: Mapping[str, Any]) -> list[str]:
    problems = []
    if "pipeline" in given and given["pipeline"] not in (*_PIPELINES, *_OUR_PIPELINES, "auto"):
        problems.append(
            f"pipeline is {shown(given['pipeline'])}, but it must be simple (all forwards, then all "
            f"backwards) or interleaved (backward first); _only_forward, auto, {', '.join(_OUR_PIPELINES)} "
            "are accepted, too."
        )
    if "placement_strategy" in given and not _is_placement(given["placement_strategy"]):
        problems.append(
            f"placement_strategy is {shown(given['placement_strategy'])}, but it must be cluster (the same "
            "as DPT), spread (TPD), or another order of the letters D, P and T; the rightmost changes "
            "fastest."
        )
    if "optimize" in given and given["optimize"] not in ("speed", "memory"):
        problems.append(f"optimize is {shown(given['optimize'])}, but it must be speed or memory.")
    if "ddp_dist_backend" in given and given["ddp_dist_backend"] not in _BACKENDS:
        problems.append(
            f"ddp_dist_backend is {shown(given['ddp_dist_backend'])}, but it must be "
            f"{', '.join(_BACKENDS[:-1])} or {_BACKENDS[-1]}."
        )
    return problems


def _is_placement(value: Any) -> bool:
    return isinstance(value, str) and (
        value in ("cluster", "spread") or sorted(value.upper()) == sorted("DPT")
    )


def _wrong_numbers(given: Mapping[str, Any]) -> list[str]:
    problems = []
    if "partition_file" in given and not isinstance(given["partition_file"], str):
        problems.append(
            f"partition_file is {shown(given['partition_file'])}, but it must be text: the path of a file."
        )
    if "default_partition" in given and not _is_count(given["default_partition"], least=0):
        problems.append(
            f"default_partition is {shown(given['default_partition'])}, but it must be a whole number of at "
            "least 0: the stage of modules outside any smp.partition."
        )
    weight = given.get("memory_weight", 0.5)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 1:
        problems.append(
            f"memory_weight is {shown(weight)}, but it must be a number from 0 (balance time only) to 1 "
            "(balance memory only)."
        )
    if "ddp_port" in given and not (_is_count(given["ddp_port"]) and given["ddp_port"] < 2**16):
        problems.append(
            f"ddp_port is {shown(given['ddp_port'])}, but it must be a TCP port, from 1 to 65535."
        )
    return problems


def _contradictions(given: Mapping[str, Any]) -> list[str]:
    problems = []
    partitions, degree = given.get("partitions"), given.get("pipeline_parallel_degree")
    stages = degree if partitions is None else partitions
    if None not in (partitions, degree) and partitions != degree:
        problems.append(
            f"partitions is {shown(partitions)} and pipeline_parallel_degree is {shown(degree)}, but they "
            "are two names of one setting. Give one of them."
        )
    default = given.get("default_partition")
    if given.get("auto_partition") is False and default is None:
        problems.append(
            "auto_partition is False, but default_partition does not say where modules outside any "
            'smp.partition go. Add "default_partition": 0, or leave auto_partition at True.'
        )
    if _is_count(default, least=0) and _is_count(stages) and default >= stages:
        problems.append(
            f"default_partition is {default}, but with {stages} partitions it must be from 0 to {stages - 1}."
        )
    problems += [
        f"{key} is {shown(given[key])}, but it has a meaning only with ddp. "
        f'Add "ddp": True, or leave {key} out.'
        for key in ("ddp_port", "ddp_dist_backend")
        if key in given and not given.get("ddp")
    ]
    if given.get("ddp") is True and given.get("horovod") is True:
        problems.append(
            "ddp and horovod are both True, but replicas are kept equal by one of them. Set horovod to False."
        )
    return problems


def _unknown(key: str, known: list[str]) -> str:
    close = get_close_matches(key, known, n=1, cutoff=0.6)
    hint = f" Did you mean {close[0]}?" if close else ""
    return f"{printable(key)} is not a parameter of the model parallel library, and is passed over.{hint}"
