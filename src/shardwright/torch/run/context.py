"""The state of a run: settings, ranks, process groups, the wrapped model. One object, made by `init`."""

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwright.cluster import Cluster
from shardwright.comm.backend import BACKEND
from shardwright.comm.blame import Blame
from shardwright.comm.codec import declare
from shardwright.comm.devices_in_use import DEVICE_VARIABLE, uses_gpus
from shardwright.comm.launch_environment import LaunchEnvironment
from shardwright.comm.local_peers import LocalPeers, connect_local_peers
from shardwright.comm.process_group import (
    default_store,
    group_of,
    leave_groups_in_doubt,
    session_of_group,
    tell_all,
    tell_from,
)
from shardwright.comm.roll_call import RollCall
from shardwright.comm.session import Session
from shardwright.comm.small_collectives import SmallCollectives
from shardwright.comm.transport import Transport
from shardwright.comm.versions import refuse_mixed_versions
from shardwright.comm.whereabouts import Whereabouts
from shardwright.config import Config
from shardwright.errors import ConfigError, ShardwrightError, UsageError
from shardwright.files import DocumentError, UserFile, parse_json
from shardwright.mesh import Axes, Mesh, gradient_axes
from shardwright.observe.console import Console
from shardwright.plan import Plan
from shardwright.planner import overruled_settings
from shardwright.printable import shown
from shardwright.problems import join
from shardwright.torch.run.roles import Reports, WrappedModel, WrappedOptimizer

__all__ = ["Context", "context", "following", "is_initialized", "set_context"]

declare(Plan)

_T = TypeVar("_T")
_ContextT = TypeVar("_ContextT", bound="Context")
_PORTS = ("SHARDWRIGHT_MASTER_PORT", "MASTER_PORT")


@dataclass(slots=True)
class Context:
    """Everything that belongs to one run.

    Attributes:
        config: the settings.
        mesh: the grid of ranks.
        rank: this world rank.
        local_rank: rank on this host.
        local_size: ranks on this host.
        device: where this rank computes.
        pipeline_group: ranks that share this replica; None for a single rank.
        data_group: ranks that hold the same stage; None for a single rank.
        shard_group: those of them that share its parameters; None where each has all of them.
        replica_group: those of them that have the same part of it; None for a single rank.
        local_peers: ways to the other ranks of this host; None where messages take other ways.
        transport: messages inside the replica.
        replica: small collectives inside the replica.
        world: small collectives of all ranks.
        plan: the plan in force; None until the first step, unless one was given.
        cluster: the present machines, once they were measured.
        blame: finds out which rank failed first; None for a single rank.
        whereabouts: where this rank is in its script, for the others; None for a single rank.
        roll_call: waits for ranks that are to make a call together; None for a single rank.
        reporter: tells the observer what happens.
        model: the wrapped model.
        optimizers: the wrapped optimizers.
        cleanup: what `shutdown` takes back.
    """

    config: Config
    mesh: Mesh
    rank: int
    local_rank: int
    local_size: int
    device: torch.device
    pipeline_group: dist.ProcessGroup | None = None
    data_group: dist.ProcessGroup | None = None
    shard_group: dist.ProcessGroup | None = None
    replica_group: dist.ProcessGroup | None = None
    local_peers: LocalPeers | None = None
    transport: Transport | None = None
    replica: SmallCollectives | None = None
    world: SmallCollectives | None = None
    plan: Plan | None = None
    cluster: Cluster | None = None
    reporter: Reports | None = None
    blame: Blame | None = None
    whereabouts: Whereabouts | None = None
    roll_call: RollCall | None = None
    model: WrappedModel | None = None
    optimizers: list[WrappedOptimizer] = field(default_factory=list)
    cleanup: ExitStack = field(default_factory=ExitStack)
    _alone: dist.ProcessGroup | None = None

    @property
    def pipeline_rank(self) -> int:
        """Position in the pipeline, from 0."""
        return self.mesh.group_rank("pp", self.rank)

    @property
    def data_rank(self) -> int:
        """Which replica, from 0."""
        return self.mesh.group_rank("rdp", self.rank)

    @property
    def pipeline_ranks(self) -> tuple[int, ...]:
        """World ranks of this replica, by pipeline rank."""
        return self.mesh.group("pp", self.rank)

    def group_of_replicas(self) -> dist.ProcessGroup | None:
        """One rank of each replica, this one of its own; None for a single rank."""
        if self.mesh.world_size == 1:
            return None
        if self.mesh.data > 1:
            return self.data_group
        if self._alone is None:
            timeout = timedelta(seconds=self.config.timeout_s)
            self._alone = dist.new_group([self.rank], timeout=timeout, use_local_synchronization=True)
        return self._alone

    def further_group(self, axes: Axes, *, use: str) -> dist.ProcessGroup:
        """A group of its own for a use; collective over all ranks."""
        return _own_group(self.mesh, self.rank, axes, use=use, timeout_s=self.config.timeout_s)

    def from_first_rank(self, make: Callable[[], _T]) -> _T:
        """What the first rank makes, of kinds that `codec` takes, on every rank; collective over all ranks.

        The ranks fail together.

        Raises:
            ShardwrightError: what `make` raised on the first rank, or that it raised something else there.
        """
        made: list[Any] = [None]
        unexpected: Exception | None = None
        if self.rank == 0:
            try:
                made[0] = make()
            except ShardwrightError as error:
                made[0] = error
            except Exception as error:
                unexpected = error
                made[0] = ShardwrightError(f"rank 0 has failed: {type(error).__name__}: {error}")
        if self.mesh.world_size > 1:
            made[0] = tell_from(0, made[0])
        if unexpected is not None:
            raise unexpected
        if isinstance(made[0], ShardwrightError):
            raise made[0]
        result: _T = made[0]
        return result


class _Current:
    context: Context | None = None


def context() -> Context:
    """The current run.

    Raises:
        UsageError: `init` was not called.
    """
    if _Current.context is None:
        raise UsageError(
            "shardwright is not initialised. Call shardwright.torch.init() first, once on every rank."
        )
    return _Current.context


def is_initialized() -> bool:
    """Whether `init` was called."""
    return _Current.context is not None


def set_context(value: Context | None) -> None:
    """Installs a run, or removes it."""
    _Current.context = value


def settings_from(environ: Mapping[str, str]) -> list[Mapping[str, Any]]:
    """Settings that the launcher passes by environment variables, weakest first.

    ``SHARDWRIGHT_CONFIG`` names a JSON or YAML file, ``SHARDWRIGHT_SET`` is a JSON object,
    ``SHARDWRIGHT_PLAN`` names a plan file. (``SHARDWRIGHT_RUN_DIR`` is for `RunFolder.create`.)

    Raises:
        ConfigError: a file or a variable cannot be read, or ``SHARDWRIGHT_DEVICE`` names no device.
    """
    if (chosen := environ.get(DEVICE_VARIABLE) or "auto") not in ("auto", "cpu"):
        raise ConfigError(f"{DEVICE_VARIABLE} is {shown(chosen)}, but it must be auto or cpu.")
    layers: list[Mapping[str, Any]] = []
    if path := environ.get("SHARDWRIGHT_CONFIG"):
        file = UserFile(path, what="SHARDWRIGHT_CONFIG", error=ConfigError)
        found = _object("SHARDWRIGHT_CONFIG", {} if (held := file.read_yaml()) is None else held)
        Config.check(found, source=str(file))
        layers.append(found)
    if text := environ.get("SHARDWRIGHT_SET"):
        try:
            found = parse_json(text)
        except DocumentError as error:
            raise ConfigError(
                f"SHARDWRIGHT_SET is {shown(text)}, but it must be an object such as "
                f'{{"microbatches": 4}}: {error}.'
            ) from None
        layers.append(_object("SHARDWRIGHT_SET", found))
    if path := environ.get("SHARDWRIGHT_PLAN"):
        layers.append({"plan": path})
    return layers


def _object(variable: str, found: Any) -> Mapping[str, Any]:
    if isinstance(found, Mapping):
        return found
    raise ConfigError(
        f"the settings of {variable} are {shown(found)}, but they must be an object such as "
        '{"microbatches": 4}.'
    )


def make_context(config: Config, plan: Plan | None, *, kind: type[_ContextT]) -> _ContextT:
    """Finds the ranks, joins them, and lays them out."""
    from shardwright.comm.environment import detect
    from shardwright.comm.process_group import init_process_group

    environment = detect(os.environ)
    if config.ddp_port is not None and os.environ.keys().isdisjoint(_PORTS):
        environment = replace(environment, master_port=config.ddp_port)
    device = _device(environment.local_rank)
    _announce(environment)
    _check_backend(config.ddp_dist_backend, device)
    if not dist.is_initialized() and environment.world_size > 1:
        backend = config.ddp_dist_backend
        if backend == "auto":
            backend = "nccl" if device.type == "cuda" else "gloo"
        init_process_group(environment, backend=backend, timeout_s=config.timeout_s, device=device)
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if plan is not None:
        plan.check_world(world_size)
        config = following(plan, config, warns=rank == 0)
    mesh = config.resolve_world(world_size)
    made = kind(
        config=config,
        mesh=mesh,
        rank=rank,
        local_rank=environment.local_rank,
        local_size=environment.local_world_size,
        device=device,
        plan=plan,
        blame=Blame(default_store(), rank=rank) if world_size > 1 else None,
    )
    if world_size > 1:
        _say_who_is_trusted(session_of_group(timeout_s=config.timeout_s), environment)
        refuse_mixed_versions(tell_all)
        leave_groups_in_doubt()
        if device.type == "cpu" and config.shared_memory:
            made.local_peers = connect_local_peers(timeout_s=config.timeout_s)
        made.world = SmallCollectives(range(world_size), rank=rank, local=made.local_peers)
    own_group = partial(_own_group, mesh, rank, timeout_s=config.timeout_s)
    if mesh.pipeline > 1:
        made.pipeline_group = own_group("pp", use="collectives of a replica")
        nccl = dist.get_backend() == "nccl"
        # By name: in a step the default group is that of the replicas of a stage (`replica_collectives`).
        up = own_group("pp", use="activations") if nccl else dist.group.WORLD
        down = own_group("pp", use="gradients") if nccl else dist.group.WORLD
        made.transport = Transport(
            made.pipeline_ranks, rank=made.pipeline_rank, up=up, down=down, local=made.local_peers
        )
        made.replica = SmallCollectives(
            made.pipeline_ranks, rank=rank, group=made.pipeline_group, local=made.local_peers
        )
    if mesh.data > 1:
        own_group = partial(own_group, backend=_backend_of_replicas(config, device))
        made.data_group = own_group(gradient_axes(), use="sums over replicas")
        if mesh.shard > 1:
            made.shard_group = own_group("dp_shard", use="shards")
            made.replica_group = (
                own_group("dp_replicate", use="replicas of shards") if mesh.shard < mesh.data else None
            )
    return made


def _check_backend(wanted: str, device: torch.device) -> None:
    """Refuses a backend that cannot be had, before any rank waits for another."""
    if wanted == "nccl" and device.type != "cuda":
        raise ConfigError(
            f"ddp_dist_backend is nccl, which sends what GPUs hold, but torch {torch.__version__} finds no "
            "GPU on this host. Set ddp_dist_backend auto, or install a build of torch for CUDA."
        )
    present = dist.get_backend() if dist.is_initialized() else wanted
    if wanted != "auto" and present != wanted and present in ("gloo", "nccl"):
        raise ConfigError(
            f"ddp_dist_backend is {wanted}, but the script has made a process group of {present} already. "
            "Remove the setting, or call sw.init before torch.distributed.init_process_group."
        )


def _backend_of_replicas(config: Config, device: torch.device) -> str | None:
    """Shardwright's collectives on CPUs, unless gloo is asked for; None for the backend of the run.

    Raises:
        ConfigError: the settings need what the other backend lacks.
    """
    if device.type == "cpu" and config.ddp_dist_backend == "auto" and config.shared_memory:
        return BACKEND
    for key in ("sdp_quantized_gradients", "sdp_quantized_parameters"):
        if getattr(config, key):
            raise ConfigError(
                f"{key} needs Shardwright's own collectives, but replicas use {dist.get_backend()} here: the "
                f"device is {device.type}, ddp_dist_backend is {config.ddp_dist_backend}, shared_memory is "
                f"{config.shared_memory}. On CPUs, set ddp_dist_backend auto and shared_memory true; on "
                f"GPUs, set {key} false."
            )
    return None


def following(plan: Plan, config: Config, *, warns: bool) -> Config:
    """The settings as a plan has them; warns of those that it overrules."""
    overruled = list(overruled_settings(plan, config))
    if overruled and warns:
        warnings.warn(join("the plan decides otherwise than the settings:", overruled), stacklevel=4)
    return Config.merge(
        config,
        {
            "pipeline_parallel_degree": plan.mesh.pipeline,
            "data_parallel_degree": plan.mesh.data,
            "sharded_data_parallel_degree": plan.mesh.shard,
            "microbatches": plan.schedule.microbatches,
            "placement_strategy": plan.mesh.placement_strategy,
        },
    )


def _announce(environment: LaunchEnvironment) -> None:
    """Says which ranks there are, and who said so: before the first one waits for the others."""
    num, source = environment.world_size, environment.source
    if dist.is_initialized():
        num, source = dist.get_world_size(), "torch.distributed's process group"
    rank = dist.get_rank() if dist.is_initialized() else environment.rank
    Console(prints=rank == 0).status(f"shardwright: {num} rank{'s' * (num > 1)} ({source})")


def _say_who_is_trusted(session: Session, environment: LaunchEnvironment) -> None:
    """Says so, on the first rank, where strangers could talk to the ranks."""
    if session.seal is None:
        Console(prints=dist.get_rank() == 0).status(
            "shardwright: the ranks have no secret, so that everybody who reaches the store at "
            f"{environment.master_addr}:{environment.master_port} is believed. Set SHARDWRIGHT_SECRET, the "
            "same on "
            "all hosts and new for each run (openssl rand -hex 32), or keep strangers off that network"
        )


def _own_group(
    mesh: Mesh, rank: int, axes: Axes, *, use: str, timeout_s: float, backend: str | None = None
) -> dist.ProcessGroup:
    """Makes all groups along these axes, on all ranks in the same order; returns that of this rank."""
    made = {
        ranks: group_of(ranks, use=use, timeout_s=timeout_s, backend=backend) for ranks in mesh.groups(axes)
    }
    return made[mesh.group(axes, rank)]


def _device(local_rank: int) -> torch.device:
    if uses_gpus():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")
