"""Settings under the names of SageMaker's library: where they come from, and their defaults.

Strongest last: the dictionary that a script gives ``smp.init``, then ``SM_HP_MP_PARAMETERS``, which a
launcher sets. (What ``shardwright run`` was told by ``--set``, ``--config`` or ``--plan`` wins over both.)

No framework is imported here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from shardwright.config import Config
from shardwright.errors import ConfigError
from shardwright.launch.ranks.smp_parameters import check_smp_parameters, read_smp_parameters
from smdistributed.modelparallel.launcher_parameters import parameters_among

PARAMETERS_VARIABLE = "SM_HP_MP_PARAMETERS"

# Every key of the library with its default. A function works it out from the others.
_DEFAULTS: dict[str, Any] = {
    "pipeline_parallel_degree": 1,
    "partitions": lambda known: known["pipeline_parallel_degree"],
    "microbatches": 1,
    "pipeline": "interleaved",
    "optimize": "memory",
    "auto_partition": True,
    "default_partition": 0,
    "placement_strategy": "cluster",
    "contiguous": True,
    "horovod": False,
    "xla": False,
    "fork": False,
    "load_partition": False,
    "partition_file": None,
    "memory_weight": lambda known: 0.2 if known["optimize"] == "speed" else 0.8,
    "ddp": False,
    "ddp_port": None,
    "ddp_dist_backend": "auto",
    "active_microbatches": lambda known: known["pipeline_parallel_degree"] + 2,
    "deterministic_server": False,
    "offload_activations": False,
    "activation_loading_horizon": 4,
    "tensor_parallel_degree": 1,
    "fp16_params": False,
    "fp16": False,
    "bf16": False,
    "shard_optimizer_state": False,
    "prescaled_batch": False,
    "skip_tracing": False,
    "sharded_data_parallel_degree": 1,
    "sdp_reduce_bucket_size": 500_000_000,
    "sdp_param_persistence_threshold": 1_000_000,
    "sdp_max_live_parameters": 1_000_000_000,
    "sdp_hierarchical_allgather": True,
    "sdp_gradient_clipping": 1.0,
    "delayed_parameter_initialization": False,
    "static_mode": False,
    "fast_mode": False,
    "checkpoint_attentions": False,
    "_match_weights": False,
    "_fp32_grad_accumulation": False,
    "overlapping_allreduce": True,
}

_RENAMED = {"partitions": "pipeline_parallel_degree"}

# They may have any value, because what they steer does not exist here, or is decided without them.
_WITHOUT_EFFECT = frozenset(
    (
        "contiguous xla fork deterministic_server skip_tracing sdp_hierarchical_allgather "
        "static_mode fast_mode checkpoint_attentions _fp32_grad_accumulation overlapping_allreduce "
        "sdp_reduce_bucket_size"
    ).split()
)

# They have their meaning, which is given to them here and not by `Config`.
_OUR_OWN_BUSINESS = frozenset(
    (
        "delayed_parameter_initialization",
        "prescaled_batch",
        "fp16_params",
        "horovod",
        "_match_weights",  # distributed modules always take over the weights of what they replace
    )
)

# Defaults that are stated to `Config`, whose own are others.
_STATED = ("pipeline_parallel_degree", "microbatches", "pipeline", "optimize", "memory_weight")
_STATED_WHEN_OFFLOADED = ("activation_loading_horizon",)
_STATED_WHEN_SHARDED = (
    "sdp_param_persistence_threshold",
    "sdp_max_live_parameters",
    "sdp_gradient_clipping",
)


class Settings:
    """What ``smp.state.cfg`` is: every setting as an attribute."""

    def __init__(self, values: Mapping[str, Any]):
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        close = get_close_matches(name, list(self.__dict__), n=1, cutoff=0.6)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise AttributeError(f"{name} is not a setting of the model parallel library.{hint}")

    def __repr__(self) -> str:
        return f"Settings({', '.join(f'{key}={value!r}' for key, value in self.__dict__.items())})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Settings that were read.

    Attributes:
        values: every key of the library, with its default where it was not given.
        given: keys that were given, under their canonical names.
        remarks: what a user should know of settings that change nothing, one sentence each.
    """

    values: Mapping[str, Any]
    given: frozenset[str]
    settings: Mapping[str, Any]
    remarks: tuple[str, ...]


def read_configuration(
    config: Mapping[str, Any] | None, environ: Mapping[str, str], words: Sequence[str] = ()
) -> Configuration:
    """Reads what the script and its launcher say.

    Args:
        environ: the environment variables; those that are set here win over `words`, and these over `config`.
    """
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(
            f"smp.init takes a dictionary of settings, not a {type(config).__name__}. For example: "
            'smp.init({"partitions": 2, "microbatches": 4})'
        )
    remarks: list[str] = []
    found: dict[str, Any] = {}
    written: dict[str, str] = {}
    for layer in (config or {}, parameters_among(words), _from_launcher(environ)):
        found |= _canonical(layer, remarks)
        written |= {_RENAMED.get(str(key), str(key)): str(key) for key in layer if layer[key] is not None}
    check_smp_parameters({written.get(key, key): value for key, value in found.items()})
    without_effect = [key for key in found if key in _WITHOUT_EFFECT and found[key] != _DEFAULTS[key]]
    if without_effect:
        several = len(without_effect) > 1
        remarks.append(
            f"{', '.join(without_effect)} {'are' if several else 'is'} accepted, and "
            f"change{'' if several else 's'} nothing here."
        )
    return Configuration(
        values=_resolved(found),
        given=frozenset(found),
        settings=_for_shardwright(found),
        remarks=tuple(remarks),
    )


def _from_launcher(environ: Mapping[str, str]) -> Mapping[str, Any]:
    text = environ.get(PARAMETERS_VARIABLE, "").strip()
    if not text:
        return {}
    try:
        return read_smp_parameters(text)
    except ConfigError as error:
        raise ConfigError(f"{PARAMETERS_VARIABLE} cannot be used: {error}") from error


def _canonical(layer: Mapping[str, Any], remarks: list[str]) -> dict[str, Any]:
    """One layer of settings under one name each; those that nobody knows are left out."""
    found: dict[str, Any] = {}
    for raw_key, value in layer.items():
        key = str(raw_key) if str(raw_key) in _DEFAULTS else str(raw_key).replace("-", "_")
        name = _RENAMED.get(key, key)
        if name not in _DEFAULTS and name not in Config.model_fields:
            remarks.append(_unknown(str(raw_key)))
        elif value is None:
            continue
        elif name in found and found[name] != value:
            raise ConfigError(
                f"partitions and pipeline_parallel_degree are two names of one setting, and are "
                f"{found[name]!r} and {value!r}. Give one of them."
            )
        else:
            found[name] = value
    return found


def _unknown(key: str) -> str:
    close = get_close_matches(key, [*_DEFAULTS, *Config.model_fields], n=1, cutoff=0.6)
    return f"{key} is not a setting, and is passed over." + (f" Did you mean {close[0]}?" if close else "")


def _resolved(found: Mapping[str, Any]) -> dict[str, Any]:
    known: dict[str, Any] = {}
    for key, default in _DEFAULTS.items():
        worked_out: Callable[[Mapping[str, Any]], Any] | None = default if callable(default) else None
        value = worked_out(known) if worked_out is not None else default
        known[key] = found.get(key, value)
    return known


def _for_shardwright(found: Mapping[str, Any]) -> dict[str, Any]:
    values = _resolved(found)
    sharded = values["sharded_data_parallel_degree"] != 1
    stated = (
        *_STATED,
        *(_STATED_WHEN_SHARDED if sharded else ()),
        *(_STATED_WHEN_OFFLOADED if values["offload_activations"] else ()),
    )
    settings = {key: values[key] for key in stated if key not in found}
    for key, value in found.items():
        if key not in _WITHOUT_EFFECT and key not in _OUR_OWN_BUSINESS:
            settings[key] = value
    if settings["pipeline"] == "_only_forward":
        settings["pipeline"] = "auto"  # what a step does decides it
    return settings
