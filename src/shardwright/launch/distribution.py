"""Reads an estimator's ``distribution``: the processes per host, and their settings.

=========================================================  =================================================
``{"smdistributed": {"modelparallel": {...}}, "mpi": ...}``  scripts for the model parallel library
``{"smdistributed": {"dataparallel": {"enabled": True}}}``   scripts for the data parallel library
``{"torch_distributed": {"enabled": True}}``                 scripts for torchrun
``{"pytorchddp": {"enabled": True}}``, ``{"mpi": {...}}``    scripts for mpirun
``{"shardwright": {"processes_per_host": 2,``                scripts for Shardwright; the parameters are
``"parameters": {"microbatches": 4}}}``                      its settings, or the path of a file of them
``{"processes_per_host": 2, "microbatches": 4}``             the same, in short
=========================================================  =================================================
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shardwright.config import Config
from shardwright.errors import ConfigError
from shardwright.files import UserFile
from shardwright.launch.processes import check_processes, check_variables, shown
from shardwright.launch.ranks.smp_parameters import check_smp_parameters, read_smp_parameters

_LAUNCHERS = ("smdistributed", "mpi", "torch_distributed", "pytorchddp", "shardwright")
_LIBRARIES = ("modelparallel", "dataparallel")
_ELSEWHERE = {
    "parameter_server": "parameter servers are not there: scripts average gradients, by "
    "smdistributed.dataparallel.tensorflow or horovod.tensorflow",
    "multi_worker_mirrored_strategy": "tf.distribute starts and joins its own processes: start one a host, "
    "without distribution",
    "horovod": 'scripts that import Horovod are started by {"mpi": {"enabled": True, '
    '"processes_per_host": N}}',
}
_PROCESSES = "processes_per_host"
# Settings of the second library (torch.sagemaker), which the first does not have.
_OF_SECOND_LIBRARY = (
    "hybrid_shard_degree sm_activation_offloading fsdp_cache_flush_warnings allow_empty_shards "
    "context_parallel_degree expert_parallel_degree"
).split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """The request in a ``distribution``.

    Attributes:
        processes_per_host: as it was asked for; None leaves it to the machines.
        is_one_process: nothing asks for more than one process a host.
        mpi: scripts see that they were started by mpirun.
        dataparallel: scripts see that the data parallel library is enabled.
        mp_parameters: of the model parallel library; None without it.
        remarks: what a user should know, one sentence each.
    """

    processes_per_host: int | None = None
    is_one_process: bool = True
    mpi: bool = False
    mpi_options: str = ""
    dataparallel: bool = False
    mp_parameters: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


def read_distribution(given: Mapping[str, Any] | None) -> Distribution:
    if not given:
        return Distribution()
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"distribution is a {type(given).__name__}, but it must be a dictionary, such as "
            '{"torch_distributed": {"enabled": True}}.'
        )
    if not any(key in given for key in (*_LAUNCHERS, *_ELSEWHERE)):
        return _plain(given)
    _refuse_unknown(given)
    parts = {name: _part(given, name) for name in _LAUNCHERS}
    smp, smddp = _libraries(given)
    if smp is not None:
        _refuse_without_mpi(given, by_torchrun=parts["torch_distributed"] is not None)
    mpi = parts["mpi"] or (smddp or parts["pytorchddp"] or {})
    options = str(mpi.get("custom_mpi_options") or "")
    parameters = (
        None if smp is None else _mp_parameters(smp, by_torchrun=parts["torch_distributed"] is not None)
    )
    enabled = [part for part in (*parts.values(), smp, smddp) if part is not None]
    own = parts["shardwright"]
    return Distribution(
        processes_per_host=_processes(enabled),
        is_one_process=not enabled,
        mpi=parts["mpi"] is not None or parts["pytorchddp"] is not None,
        mpi_options=options,
        dataparallel=smddp is not None,
        mp_parameters=parameters,
        settings={} if own is None else _settings(own.get("parameters")),
        environment=_exported(options),
        remarks=() if parameters is None else check_smp_parameters(parameters, needs_degree=True),
    )


def _plain(given: Mapping[str, Any]) -> Distribution:
    """``{"processes_per_host": 2, "microbatches": 4}``."""
    settings = {key: value for key, value in given.items() if key not in (_PROCESSES, "parameters")}
    known = [*_LAUNCHERS, _PROCESSES, *Config.model_fields]
    if unknown := [key for key in settings if str(key).replace("-", "_") not in (*known, "partitions")]:
        raise ConfigError(_no_key(unknown[0], known))
    return Distribution(
        processes_per_host=_processes([given]),
        is_one_process=False,
        settings=_settings({**_settings(given.get("parameters")), **settings}),
    )


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    for key in given:
        if key in _ELSEWHERE:
            raise ConfigError(f"distribution has {key}: {_ELSEWHERE[key]}.")
        if key not in _LAUNCHERS:
            raise ConfigError(_no_key(str(key), _LAUNCHERS))


def _no_key(key: str, known: list[str] | tuple[str, ...]) -> str:
    if key in _LIBRARIES:
        return (
            f"distribution has {key!r} itself, but it is a library of smdistributed. Write "
            f'{{"smdistributed": {{"{key}": {{"enabled": True, ...}}}}, ...}}.'
        )
    close = get_close_matches(key, known, n=1, cutoff=0.6)
    hint = f"Did you mean {close[0]}?" if close else f"Known are {', '.join(_LAUNCHERS)}."
    return f"distribution has {key!r}, which is no way to start processes. {hint}"


def _part(given: Mapping[str, Any], name: str, where: str = "") -> Mapping[str, Any] | None:
    """A part of the dictionary that is there and enabled."""
    part = given.get(name)
    path = f"{where}{name}"
    if part is None or (name == "smdistributed" and not where):
        return None
    if not isinstance(part, Mapping):
        raise ConfigError(
            f"distribution has {path}: {part!r}, but it must be a dictionary: "
            f'{{"{name}": {{"enabled": True}}}}.'
        )
    enabled = part.get("enabled", True if name == "shardwright" else None)
    if not isinstance(enabled, bool):
        what = "does not say whether it is enabled" if enabled is None else f"has enabled: {enabled!r}"
        raise ConfigError(f'distribution: {path} {what}. Write {{"{name}": {{"enabled": True, ...}}}}.')
    return part if enabled else None


def _libraries(given: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """The parts of the model parallel and of the data parallel library."""
    libraries = given.get("smdistributed")
    if libraries is None:
        return None, None
    if not isinstance(libraries, Mapping) or not libraries or any(key not in _LIBRARIES for key in libraries):
        raise ConfigError(
            f"distribution has smdistributed: {libraries!r}, but it must be a dictionary with modelparallel "
            "or dataparallel in it: "
            '{"smdistributed": {"modelparallel": {"enabled": True, "parameters": {...}}}}.'
        )
    smp, smddp = (_part(libraries, name, "smdistributed.") for name in _LIBRARIES)
    if smp is not None and smddp is not None:
        raise ConfigError(
            "smdistributed.modelparallel and smdistributed.dataparallel are both enabled, but they cannot be "
            'combined. For replicas of a model that is split, set "ddp": True among the parameters of '
            "modelparallel, and leave dataparallel out."
        )
    return smp, smddp


def _refuse_without_mpi(given: Mapping[str, Any], *, by_torchrun: bool) -> None:
    """Refuses the model parallel library where MPI is switched off, which it is started with."""
    mpi = given.get("mpi")
    if mpi is None or mpi["enabled"] or by_torchrun:
        return
    number = mpi.get(_PROCESSES)
    raise ConfigError(
        "smdistributed.modelparallel is enabled, but mpi has enabled: False. The processes of the model "
        "parallel library are those of MPI, so that nothing would start more than one on each host. Write "
        f'"mpi": {{"enabled": True, "{_PROCESSES}": {8 if number is None else number}}}.'
    )


def _mp_parameters(part: Mapping[str, Any], *, by_torchrun: bool) -> dict[str, Any]:
    parameters = read_smp_parameters(part.get("parameters") or {})
    second = [key for key in _OF_SECOND_LIBRARY if key in parameters]
    if second:
        raise ConfigError(
            f"{', '.join(second)}: these are parameters of the second model parallel library "
            "(torch.sagemaker), which an estimator does not start. Start its scripts by shardwright run, "
            "with these in SM_HP_MP_PARAMETERS (compat/README.md), or use sharded_data_parallel_degree."
        )
    if by_torchrun and not parameters:
        raise ConfigError(
            "smdistributed.modelparallel with torch_distributed and without parameters starts the second "
            "model parallel library (torch.sagemaker), which an estimator does not: start its scripts by "
            'shardwright run (compat/README.md). For the first add "parameters": '
            '{"partitions": 2}.'
        )
    return parameters


def _processes(parts: list[Mapping[str, Any]]) -> int | None:
    found = {shown(part[_PROCESSES]): part[_PROCESSES] for part in parts if part.get(_PROCESSES) is not None}
    if len(found) > 1:
        raise ConfigError(
            f"distribution asks for {_PROCESSES} {' and '.join(found)}. Give one number of processes."
        )
    for number in found.values():
        return check_processes(number)
    return None


def _settings(given: Any) -> dict[str, Any]:
    """Shardwright's settings, from a dictionary or a file; checked."""
    if given is None:
        return {}
    if isinstance(given, str | Path):
        file = UserFile(given, what="settings:", error=ConfigError)
        found = file.read_yaml()
        given = {} if found is None else found
        Config.check(given, source=str(file))
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"settings are {shown(given)}, but they must be a dictionary such as {{'microbatches': 4}}, or "
            "the path of a YAML or JSON file."
        )
    Config.parse(given)
    return dict(given)


def _exported(options: str) -> dict[str, str]:
    """Variables that ``-x NAME=VALUE`` exports: ranks get them without mpirun as well."""
    try:
        words = shlex.split(options)
    except ValueError as error:
        raise ConfigError(f"custom_mpi_options is {options!r}, which no shell can read: {error}.") from error
    pairs = [word.partition("=") for before, word in zip(["", *words], words, strict=False) if before == "-x"]
    found = {name: value for name, equals, value in pairs if equals}
    check_variables(found, what="custom_mpi_options")
    return found
