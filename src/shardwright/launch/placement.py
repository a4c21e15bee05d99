"""The number of ranks per host: SageMaker's names of machines, and its arguments without effect here.

An unknown name of a machine is no mistake: clouds have new machines every month.

Arguments without effect are accepted, so that published listings run: silently where nothing is lost, with
one warning where a user may miss something. The table is in docs/estimator.md.
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from shardwright.cluster.named import node_kinds
from shardwright.errors import ConfigError
from shardwright.launch.distribution import Distribution
from shardwright.launch.processes import check_processes

LOCAL = "local"
"""This machine, without its GPUs."""

LOCAL_GPU = "local_gpu"
"""This machine, with its GPUs."""

# Those that the planner has no figures of; the rest is in shardwright.cluster.
_GPUS = {
    "p2.xlarge": 1,
    "p2.8xlarge": 8,
    "p2.16xlarge": 16,
    "p3.2xlarge": 1,
    "p3.8xlarge": 4,
    "p5.4xlarge": 1,
    "p5e.48xlarge": 8,
    "p5en.48xlarge": 8,
    "p6-b200.48xlarge": 8,
    "g4dn.12xlarge": 4,
    "g4dn.metal": 8,
    **{
        f"{family}.{size}": gpus
        for family in ("g5", "g6", "g6e")
        for size, gpus in (("12xlarge", 4), ("24xlarge", 4), ("48xlarge", 8))
    },
}
_ONE_GPU = re.compile(r"(g4dn|g5|g6|g6e)\.(\d*xlarge)")
_NO_GPU = re.compile(r"[cmrt]\d+\w*\.\w+")
_CONTROLS = ("/dev/kfd", "/dev/dxg")  # of AMD's GPUs, and of those under Windows


def gpus_of(instance_type: str) -> int | None:
    """GPUs of one machine of a kind; None where the kind is not known.

    >>> gpus_of("ml.p4d.24xlarge"), gpus_of("ml.g5.2xlarge"), gpus_of("ml.c5.xlarge"), gpus_of("ml.x9.huge")
    (8, 1, 0, None)
    """
    name = instance_type.lower().removeprefix("ml.")
    if name == LOCAL:
        return 0
    if name == LOCAL_GPU:
        return gpus_here()
    kind = node_kinds().get(name)
    if kind is not None:
        return 0 if kind.cores else kind.num_accelerators
    if name in _GPUS:
        return _GPUS[name]
    if _ONE_GPU.fullmatch(name):
        return 1
    return 0 if _NO_GPU.fullmatch(name) else None


def gpus_here() -> int:
    """GPUs of this machine that may be used; PyTorch is asked only where there may be some."""
    if os.environ.get("SHARDWRIGHT_DEVICE") == "cpu":
        return 0
    return _gpus_of_torch() if may_have_gpus() else 0


def may_have_gpus() -> bool:
    """Whether this machine may have GPUs, without PyTorch: elsewhere than on Linux, always."""
    if sys.platform != "linux":
        return True
    return any(Path("/dev").glob("nvidia[0-9]*")) or any(Path(path).exists() for path in _CONTROLS)


def _gpus_of_torch() -> int:
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Ranks and GPUs of each host.

    Attributes:
        gpus_per_host: GPUs that a host should have; 0 where ranks compute on CPUs.
        remarks: what a user should know, one sentence each.
    """

    processes_per_host: int
    gpus_per_host: int
    remarks: tuple[str, ...] = ()


def place_processes(
    *,
    given: int | None,
    distribution: Distribution,
    instance_type: str,
    num_hosts: int,
    device: Literal["auto", "cpu"],
    is_here: bool,
) -> Placement:
    """Works out how many ranks each host has, and checks that it has as many GPUs."""
    asked = _agreed(given, distribution.processes_per_host)
    of_kind = gpus_of(instance_type)
    here = gpus_here() if is_here and device != "cpu" else 0
    if instance_type == LOCAL_GPU and is_here and not of_kind:
        raise ConfigError(
            "instance_type is local_gpu, but this machine has no GPU that PyTorch can use. Take "
            "instance_type="
            '"local": scripts for CUDA run on its CPUs.'
        )
    if asked is None:
        number = _default(distribution, instance_type, of_kind, here // num_hosts, is_here=is_here)
    else:
        number = asked
    _check_gpus(number, num_hosts, instance_type, of_kind=of_kind, here=here)
    remarks = []
    if is_here and of_kind and not here and device != "cpu":
        remarks.append(
            f"{instance_type} has {of_kind} GPUs, and this machine has none, so that ranks compute on its "
            'CPUs; a script that is written for CUDA needs device="cpu"'
        )
    needs_gpus = device != "cpu" and (bool(here) if is_here else bool(of_kind))
    return Placement(
        processes_per_host=number,
        gpus_per_host=number if needs_gpus else 0,
        remarks=tuple(remarks),
    )


def _check_gpus(number: int, num_hosts: int, instance_type: str, *, of_kind: int | None, here: int) -> None:
    if of_kind and number > of_kind:
        raise ConfigError(
            f"processes_per_host is {number}, but {instance_type} has {of_kind} GPUs, and each process "
            f"uses one. Set processes_per_host to at most {of_kind}, and instance_count to "
            f"{-(-number * num_hosts // of_kind)} for as many ranks."
        )
    if here and number * num_hosts > here:
        raise ConfigError(
            f"instance_count({num_hosts}) * processes_per_host({number}) = {number * num_hosts} processes, "
            f"but this machine has {here} GPUs, and each process uses one. Start fewer, or give "
            'device="cpu".'
        )


def _agreed(given: int | None, distributed: int | None) -> int | None:
    if given is not None:
        check_processes(given)
    if None not in (given, distributed) and given != distributed:
        raise ConfigError(
            f"processes_per_host is {given}, but in distribution it is {distributed}. Give one of them."
        )
    return distributed if given is None else given


def _default(
    distribution: Distribution, instance_type: str, of_kind: int | None, here: int, *, is_here: bool
) -> int:
    if distribution.is_one_process:
        return 1
    if of_kind is None:
        raise ConfigError(
            f"nothing is known of instance_type {instance_type!r}, so say how many processes each host "
            'should have, as many as it has GPUs: "mpi": {"enabled": True, "processes_per_host": 8}, or '
            "Estimator(..., processes_per_host=8)."
        )
    return max(1, here if is_here else of_kind)


ALIASES = {
    "distributions": "distribution",
    "train_instance_count": "instance_count",
    "train_instance_type": "instance_type",
    "train_max_run": "max_run",
}
"""Names of older versions."""

# Who pays, who may, where it is stored in the cloud, how it is called: nothing of it is here.
_SILENT = frozenset(
    (
        "role sagemaker_session tags framework_version py_version pytorch_version transformers_version "
        "tensorflow_version volume_size train_volume_size volume_kms_key train_volume_kms_key "
        "output_kms_key code_location subnets security_group_ids encrypt_inter_container_traffic "
        "enable_network_isolation enable_sagemaker_metrics container_log_level "
        "keep_alive_period_in_seconds disable_profiler input_mode enable_infra_check enable_remote_debug "
        "enable_session_tag_chaining image_uri_region disable_output_compression script_mode "
        "model_channel_name training_repository_access_mode training_repository_credentials_provider_arn"
    ).split()
)

# What a user may wait for in vain, and what does it here.
WARNED = {
    "metric_definitions": "metrics of a run are in its folder, in metrics.jsonl and report.html",
    "checkpoint_s3_uri": "checkpoints stay where the script saves them",
    "checkpoint_local_path": "checkpoints stay where the script saves them",
    "use_spot_instances": "jobs run on the machines that there are",
    "max_wait": "jobs run on the machines that there are",
    "max_retry_attempts": "max_restarts says how often ranks start again after a failure",
    "debugger_hook_config": "SageMaker's Debugger is not here",
    "rules": "SageMaker's Debugger is not here",
    "tensorboard_output_config": "set trackers to tensorboard in Shardwright's settings",
    "profiler_config": "shardwright profile measures a model, and each run leaves a timeline",
    "compiler_config": "torch.compile is the script's own matter",
    "container_entry_point": "the entry point is what is started",
    "container_arguments": "hyperparameters are what the script gets",
    "instance_groups": "all hosts of a job are alike: instance_type and instance_count",
}

_REFUSED = {
    "git_config": "clone the repository, and give its folder as source_dir",
    "model_uri": 'give it as an input: fit({"model": "path/of/the/model"})',
    "algorithm_arn": "give the entry_point of a script",
}

_OFF: tuple[Any, ...] = (None, False, [], {}, 0)


def sort_out(given: Mapping[str, Any], *, known: list[str]) -> list[str]:
    """Looks through arguments that an estimator has no use for."""
    remarks = []
    for name, value in given.items():
        if name in _REFUSED and value not in _OFF:
            raise ConfigError(f"{name} cannot be used here: {_REFUSED[name]}.")
        if name == "input_mode" and value == "Pipe":
            remarks.append("input_mode is 'Pipe', but inputs are folders, as with 'File'")
        if name in _SILENT or name in _REFUSED or (name in WARNED and value in _OFF):
            continue
        if name not in WARNED:
            close = get_close_matches(name, [*known, *_SILENT, *WARNED, *ALIASES], n=1, cutoff=0.6)
            hint = f"Did you mean {close[0]}?" if close else "Remove it."
            raise ConfigError(f"an estimator has no argument {name}. {hint}")
        remarks.append(f"{name} changes nothing here: {WARNED[name]}")
    return remarks
