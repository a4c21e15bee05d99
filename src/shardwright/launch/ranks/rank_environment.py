"""Variables and words of SageMaker scripts: set for each rank, hyperparameters among them.

::

    {"epochs": 3, "lr": 0.1, "mp_parameters": {"partitions": 2, "ddp": True}}
    --epochs 3 --lr 0.1 --mp_parameters ddp=True,partitions=2

Supervisors must start fast, so this imports only the standard library.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from shardwright.errors import ConfigError
from shardwright.launch.processes import shown, why_no_name, why_no_text

_NUMBER = re.compile(r"-[\d.]")


def with_plain_values(hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters as the script will see them: after a way through JSON."""
    plain: dict[str, Any] = {}
    for name, value in hyperparameters.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"a hyperparameter is called {name!r}, but it becomes an option of the script, so it must "
                'be text: hyperparameters={"epochs": 3}'
            )
        if (reason := why_no_name(name)) is not None:
            raise ConfigError(f"a hyperparameter is called {name!r}, but {reason}. Give it another name.")
        try:
            plain[name] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"hyperparameter {name} is {shown(value)}, which JSON cannot express ({error}). Give a "
                "number, text, a list, a dictionary, True, False or None."
            ) from error
        if (reason := why_no_text(to_words({name: plain[name]})[1])) is not None:
            raise ConfigError(f"hyperparameter {name} is {shown(value)}, but {reason}. Give another value.")
    return plain


def to_words(hyperparameters: Mapping[str, Any]) -> tuple[str, ...]:
    """The words that the script gets: ``--name value``, sorted by name.

    >>> to_words({"lr": 0.1, "b": 8, "mp_parameters": {"partitions": 2, "ddp": True}})
    ('-b', '8', '--lr', '0.1', '--mp_parameters', 'ddp=True,partitions=2')
    """
    words: list[str] = []
    for name in sorted(hyperparameters):
        value = hyperparameters[name]
        dashes = "-" if len(name) == 1 else "--"
        text = ",".join(f"{k}={value[k]}" for k in sorted(value)) if isinstance(value, dict) else str(value)
        words += [f"{dashes}{name}", text]
    return tuple(words)


def from_words(words: Sequence[str]) -> dict[str, Any]:
    """Hyperparameters from the words that a script gets; words that are no option are left out.

    >>> from_words(["input.txt", "--epochs", "3", "--lr=-0.1", "--fp16", "--name", "a b"])
    {'epochs': 3, 'lr': -0.1, 'fp16': True, 'name': 'a b'}
    """
    found: dict[str, Any] = {}
    index = 0
    while index < len(words):
        name, equals, value = words[index].partition("=")
        index += 1
        if not _is_option(name):
            continue
        if not equals and index < len(words) and not _is_option(words[index]):
            equals, value = "=", words[index]
            index += 1
        found[name.lstrip("-")] = _typed(value) if equals else True
    return found


def hyperparameter_variables(hyperparameters: Mapping[str, Any]) -> dict[str, str]:
    """``SM_HP_<NAME>`` for each; under the name with ``_``, too, where it has ``-``."""
    variables: dict[str, str] = {}
    for name, value in hyperparameters.items():
        variable = f"SM_HP_{name.upper()}"
        variables[variable] = variables[variable.replace("-", "_")] = to_text(value)
    return variables


def to_text(value: Any) -> str:
    """A value as text for a variable: text unchanged, the rest as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"))


def _is_option(word: str) -> bool:
    return word.startswith("-") and word.strip("-") != "" and not _NUMBER.match(word)


def _typed(text: str) -> Any:
    words: dict[str, Any] = {"True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if json.dumps(value) != "NaN" and value not in (float("inf"), float("-inf")) else text


CHANNEL_PREFIX = "SM_CHANNEL_"

FRAMEWORK_MODULE = "sagemaker_pytorch_container.training:main"


def host_names(number: int) -> list[str]:
    return [f"algo-{host + 1}" for host in range(number)]


def rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of one rank, those only that `environ` lacks; ``OMPI_*`` in any case."""
    numbers = {
        "OMPI_COMM_WORLD_RANK": environ["RANK"],
        "OMPI_COMM_WORLD_SIZE": environ["WORLD_SIZE"],
        "OMPI_COMM_WORLD_LOCAL_RANK": environ["LOCAL_RANK"],
        "OMPI_COMM_WORLD_LOCAL_SIZE": environ["LOCAL_WORLD_SIZE"],
        "OMPI_COMM_WORLD_NODE_RANK": environ["LOCAL_RANK"],
    }
    num_hosts, host = int(environ.get("GROUP_WORLD_SIZE", "1")), int(environ.get("GROUP_RANK", "0"))
    hosts = json_or(environ.get("SM_HOSTS"), host_names(num_hosts))
    known = {
        "SM_HOSTS": as_json(hosts),
        "SM_CURRENT_HOST": environ.get("SM_CURRENT_HOST") or hosts[host % len(hosts)],
        "SM_CURRENT_INSTANCE_TYPE": json_or(environ.get("SM_FRAMEWORK_PARAMS"), {}).get(
            "sagemaker_instance_type", "local"
        ),
    }
    if interface := environ.get("GLOO_SOCKET_IFNAME") or ("lo" if len(hosts) == 1 else ""):
        known["SM_NETWORK_INTERFACE_NAME"] = interface
    known["SM_RESOURCE_CONFIG"] = as_json(
        {
            "current_host": known["SM_CURRENT_HOST"],
            "hosts": hosts,
            "network_interface_name": known.get("SM_NETWORK_INTERFACE_NAME", ""),
        }
    )
    known["SM_TRAINING_ENV"] = as_json(_training_env({**known, **environ}))
    return {**missing(known, environ), **numbers}


def _training_env(environ: Mapping[str, str]) -> dict[str, Any]:
    """``SM_TRAINING_ENV``: all of it once more, in one object."""
    hosts = json_or(environ.get("SM_HOSTS"), [])
    return {
        "additional_framework_parameters": json_or(environ.get("SM_FRAMEWORK_PARAMS"), {}),
        "channel_input_dirs": channels_of(environ),
        "current_host": environ["SM_CURRENT_HOST"],
        "framework_module": environ.get("SM_FRAMEWORK_MODULE", FRAMEWORK_MODULE),
        "hosts": hosts,
        "hyperparameters": json_or(environ.get("SM_HPS"), {}),
        "input_data_config": json_or(environ.get("SM_INPUT_DATA_CONFIG"), {}),
        "is_master": bool(hosts) and environ["SM_CURRENT_HOST"] == sorted(hosts)[0],
        "job_name": environ.get("TRAINING_JOB_NAME", ""),
        "log_level": json_or(environ.get("SM_LOG_LEVEL"), 20),
        "master_hostname": sorted(hosts)[0] if hosts else "",
        "model_dir": environ.get("SM_MODEL_DIR", ""),
        "module_dir": environ.get("SM_MODULE_DIR", ""),
        "module_name": environ.get("SM_MODULE_NAME", ""),
        "network_interface_name": environ.get("SM_NETWORK_INTERFACE_NAME", ""),
        "num_cpus": json_or(environ.get("SM_NUM_CPUS"), 0),
        "num_gpus": json_or(environ.get("SM_NUM_GPUS"), 0),
        "output_data_dir": environ.get("SM_OUTPUT_DATA_DIR", ""),
        "output_dir": environ.get("SM_OUTPUT_DIR", ""),
        "resource_config": json_or(environ.get("SM_RESOURCE_CONFIG"), {}),
        "user_entry_point": environ.get("SM_USER_ENTRY_POINT", ""),
    }


def channels_of(environ: Mapping[str, str]) -> dict[str, str]:
    """The folders of data by the names of their channels."""
    return {
        name.removeprefix(CHANNEL_PREFIX).lower(): path
        for name, path in environ.items()
        if name.startswith(CHANNEL_PREFIX) and path
    }


def json_or(text: str | None, otherwise: Any) -> Any:
    """JSON of the kind of `otherwise`; that, where a variable is unset or has other things in it."""
    try:
        found = json.loads(text or "")
    except (ValueError, RecursionError):
        return otherwise
    is_alike = isinstance(found, type(otherwise)) and (bool(found) or not isinstance(found, list))
    return found if is_alike else otherwise


def as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def missing(known: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in known.items() if not environ.get(name)}
