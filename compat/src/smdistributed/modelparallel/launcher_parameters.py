"""What a launcher says besides settings: on the command line of the script, and of how ranks were started."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardwright.errors import ConfigError
from shardwright.launch.ranks.smp_parameters import read_smp_parameters

FRAMEWORK_VARIABLE = "SM_FRAMEWORK_PARAMS"
_OPTIONS = ("--mp_parameters", "--mp-parameters")


def parameters_among(words: Sequence[str]) -> dict[str, Any]:
    """The settings that follow ``--mp_parameters`` among the words of a command line; the last one counts.

    >>> parameters_among(["--epochs", "3", "--mp_parameters", "partitions=2,ddp=True"])
    {'partitions': 2, 'ddp': True}
    """
    text = ""
    for word, following in zip(words, [*words[1:], ""], strict=False):
        option, equals, value = word.partition("=")
        if option in _OPTIONS:
            text = value if equals else following
    text = text.strip()
    if not text or text.startswith("--") or text == "{}":
        return {}
    try:
        return read_smp_parameters(text)
    except ConfigError as error:
        raise ConfigError(f"--mp_parameters of the script cannot be used: {error}") from error


def contradictions(environ: Mapping[str, str], *, local_size: int) -> list[str]:
    """What ``SM_FRAMEWORK_PARAMS`` says otherwise than it is, one sentence each."""
    text = environ.get(FRAMEWORK_VARIABLE, "").strip()
    try:
        said = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise ConfigError(
            f"{FRAMEWORK_VARIABLE} is {text[:80]!r}, which is not a JSON object. Correct or unset it: "
            f"{FRAMEWORK_VARIABLE}='{{\"sagemaker_mpi_enabled\": true}}'"
        )
    found: list[str] = []
    per_host = said.get("sagemaker_mpi_num_of_processes_per_host")
    if said.get("sagemaker_mpi_enabled") and per_host not in (None, local_size, str(local_size)):
        found.append(
            f"{FRAMEWORK_VARIABLE} says that there are {per_host} processes on each host, but "
            f"{local_size} {'run' if local_size > 1 else 'runs'} on this one, and that is what counts."
        )
    if said.get("sagemaker_distributed_dataparallel_enabled"):
        found.append(
            f"{FRAMEWORK_VARIABLE} has sagemaker_distributed_dataparallel_enabled, and the script calls "
            "smp.init: one of the two libraries trains a model. Replicas are made here by ddp."
        )
    return found
