"""Names of settings: our own, those of SageMaker's model parallel library, and what they mean here.

Dictionaries in the style of that library are accepted: ``partitions``, ``partition_file``, and ``-`` for
``_``. Settings of that library that change nothing here end up in `Config.ignored`. Settings for features
that this version lacks are accepted at their defaults only.
"""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from shardwright.config.words_elsewhere import advice_for
from shardwright.errors import ConfigError
from shardwright.printable import printable, shown

__all__ = ["canonical", "dictionary_of", "ignored_names"]

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
        "sdp_hierarchical_allgather",
        "skip_tracing",
        "static_mode",
        "xla",
    }
)

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
    """One layer of settings; an empty one where there is none."""
    if layer is not None and not isinstance(layer, Mapping):
        raise ConfigError(
            f"the settings are {shown(layer)}, but they must be a dictionary such as {{'microbatches': 4}}."
        )
    return dict(layer or {})


def ignored_names(given: Any) -> list[str]:
    """The names in the setting ``ignored``."""
    if given is not None and not isinstance(given, list | tuple):
        raise ConfigError(f"ignored is {shown(given)}, but it must be a list of names of settings.")
    return [printable(str(name)) for name in given or ()]


def canonical(
    given: Mapping[str, Any], *, known: Collection[str], problems: list[str], ignored: list[str]
) -> dict[str, Any]:
    """One layer of settings by our names."""
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
        elif name in known or key in ("load_partition", "partition_file"):
            found[name], origin[name] = value, str(raw_key)
        else:
            problems.append(_unknown(str(raw_key), key, known))
    _plan_file(found, problems)
    return found


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
    names = [*known, *_RENAMED, *_NOT_YET, *_WITHOUT_EFFECT, "load_partition", "partition_file"]
    close = get_close_matches(key, names, n=1, cutoff=0.6)
    advice = advice_for(key.lower()) or (f"Did you mean {close[0]}?" if close else "Remove it.")
    return f"{printable(raw_key)} is not a setting. {advice}"


def _not_yet(key: str, value: Any) -> str:
    off, instead = _NOT_YET[key]
    only = f"this version does not have it yet (only {off!r})"
    return f"{key} is {shown(value)}, but {only}. Remove it, or {instead}."
