"""Reads the parameters of SageMaker's model parallel library, and checks them before any start.

They come as a dictionary, as the path of a JSON file (``"parameters": "smp.json"`` in an estimator's
``distribution``), as JSON text, or as ``partitions=2,microbatches=4`` (the form of ``--mp_parameters``).

It imports no framework: an estimator checks on a laptop what a rank would complain about an hour later.
"""

import json
import os
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeGuard, get_args

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, create_model

from shardwright.config import Config, PipelineKind
from shardwright.errors import ConfigError
from shardwright.files import DocumentError, UserFile, parse_json
from shardwright.problems import describe, join
from shardwright.quantities import MOST_RANKS
from shardwright.text import printable, shown

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
        *_out_of_range(given),
        *_contradictions(given),
    ]
    known = sorted({*_Known.model_fields, *_ANY, *Config.model_fields})
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
    return key if key in _ANY else key.replace("-", "_")


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


def _order_of_ranks(value: str) -> str:
    if value not in ("cluster", "spread") and sorted(value.upper()) != sorted("DPT"):
        raise ValueError(
            "it must be cluster (the same as DPT), spread (TPD), or another order of the letters D, P and T; "
            "the rightmost changes fastest"
        )
    return value


_Pipeline = Literal["simple", "interleaved", "_only_forward", PipelineKind]
_PIPELINES = (
    "simple (all forwards, then all backwards) or interleaved (backward first); _only_forward, "
    f"{', '.join(get_args(PipelineKind))} are accepted, too"
)
_STAGE = "a whole number of at least 0: the stage of modules outside any smp.partition"
_WEIGHT = "a number from 0 (balance time only) to 1 (balance memory only)"
_FIELDS: dict[str, Any] = {
    **dict.fromkeys(_COUNTS, (Annotated[int, Field(ge=1, le=MOST_RANKS)], 1)),
    **dict.fromkeys(_FLAGS, (bool, False)),
    "pipeline": (Annotated[_Pipeline, Field(description=_PIPELINES)], "auto"),
    "optimize": (Literal["speed", "memory"], "speed"),
    "placement_strategy": (Annotated[str, AfterValidator(_order_of_ranks)], "cluster"),
    "default_partition": (Annotated[int, Field(ge=0, le=MOST_RANKS, description=_STAGE)], 0),
    "partition_file": (Annotated[str, Field(description="text: the path of a file")], ""),
    "memory_weight": (Annotated[float, Field(ge=0, le=1, description=_WEIGHT)], 0.0),
    "ddp_port": (Annotated[int, Field(ge=1, lt=2**16, description="a TCP port, from 1 to 65535")], 1),
    "ddp_dist_backend": (Literal["auto", "nccl", "gloo"], "auto"),
}
_Known = create_model("_Known", __config__=ConfigDict(strict=True), **_FIELDS)


def _out_of_range(given: Mapping[str, Any]) -> list[str]:
    try:
        _Known.model_validate(dict(given))
    except ValidationError as error:
        return [line for finding in error.errors() for line in _worded(finding)]
    return []


def _worded(finding: Any) -> list[str]:
    """One line, with what a field's description says it must be."""
    name = str(finding["loc"][0])
    if (wanted := _Known.model_fields[name].description) is None:
        return describe([finding], root="the parameters")
    return [f"{name} is {shown(finding['input'])}, but it must be {wanted}."]


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
