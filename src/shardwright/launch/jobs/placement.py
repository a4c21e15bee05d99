"""The number of ranks per host of a training job."""

from dataclasses import dataclass
from typing import Literal

from shardwright.errors import ConfigError
from shardwright.launch.jobs.distribution import Distribution
from shardwright.launch.jobs.instances import LOCAL_GPU, gpus_here, gpus_of
from shardwright.launch.processes.counts import check_processes

__all__ = ["Placement", "place_processes"]


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
