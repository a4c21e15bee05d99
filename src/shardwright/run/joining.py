"""Starts a run and joins its ranks, whatever front end the script takes: identities, process groups."""

import importlib
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwright.comm._private import uses_gpus
from shardwright.comm.blame import Blame
from shardwright.comm.joining.interface import own_address_towards
from shardwright.comm.joining.process_group import (
    backend_for,
    default_store,
    init_process_group,
    leave_groups_in_doubt,
    refuse_mixed_versions,
    session_of_group,
    tell_all,
)
from shardwright.comm.joining.session import Session
from shardwright.comm.launch_environment import LaunchEnvironment
from shardwright.comm.launchers import detect
from shardwright.comm.local_peers import connect_local_peers
from shardwright.comm.message_names import BACKEND
from shardwright.comm.pulse import PageAddress, Pulse
from shardwright.comm.transport import SmallCollectives, Transport
from shardwright.config import Config
from shardwright.config.config import refuse_misplaced
from shardwright.errors import ConfigError, ShardwrightError, UsageError
from shardwright.mesh import Mesh
from shardwright.observe.console import Console
from shardwright.plan import Plan
from shardwright.run.context import Context, Host, RankWatch, context, is_initialized, set_context
from shardwright.run.joint_calls import prepare
from shardwright.run.launch_settings import following, given_settings
from shardwright.run.reporting import Facts, Reporter

_ContextT = TypeVar("_ContextT", bound=Context)
_SOON_S = 0.5
_PORTS = ("SHARDWRIGHT_MASTER_PORT", "MASTER_PORT")
_CHAOS = "SHARDWRIGHT_CHAOS"
"""Names a file of faults on purpose, see `shardwright.testing.faults`."""


IMPORTED_FOR_MODEL: ContextVar[str] = ContextVar("IMPORTED_FOR_MODEL")
"""The script that is imported for a function in it, and not to be run."""


def _refuse_imports() -> None:
    """Refuses a script that is imported for a function of it, as for a plan, and begins to train."""
    if script := IMPORTED_FOR_MODEL.get(""):
        raise UsageError(
            f"{script} calls sw.init() when it is imported, and only its model is wanted. Put what trains "
            "into a function, and call that under if __name__ == '__main__':"
        )


def _refuse_spawned_children() -> None:
    """Refuses a child that is being spawned: it has its parent's variables, and is no rank.

    Python itself tells such a child by the same attribute, where it refuses to spawn further ones.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "a worker of multiprocessing (of a DataLoader, perhaps) imports this script again, and is no "
            "rank of the run. Put what the script does into a function, and call it under "
            "if __name__ == '__main__':"
        )


def joined(config: Config, plan: Plan | None, *, kind: type[_ContextT]) -> _ContextT:
    """Finds the ranks, joins them, and lays them out."""
    _refuse_imports()
    _refuse_spawned_children()
    environment = detect(os.environ)
    if config.ddp_port is not None and os.environ.keys().isdisjoint(_PORTS):
        environment = replace(environment, master_port=config.ddp_port)
    if os.environ.get(_CHAOS):  # by its name: it stands above all that it disturbs
        points = importlib.import_module("shardwright.testing.fault_points")
        points.install(environment.rank, environment.world_size)
    device = _device(environment.local_rank)
    _announce(environment)
    _check_backend(config.ddp_dist_backend, device)
    if not dist.is_initialized() and environment.world_size > 1:
        backend = config.ddp_dist_backend
        init_process_group(environment, backend=backend, timeout_s=config.timeout_s, device=device)
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if plan is not None:
        plan.check_world(world_size)
        config = following(plan, config, warns=rank == 0)
    mesh = config.resolve_world(world_size)
    store: Any = default_store() if world_size > 1 else None  # whose type lacks clone()
    made = kind(
        config=config,
        mesh=mesh,
        rank=rank,
        local_rank=environment.local_rank,
        local_size=environment.local_world_size,
        device=device,
        plan=plan,
        watch=RankWatch(None if store is None else Blame(store, rank=rank)),
    )
    try:
        _tie(made, environment)
    except BaseException:
        if made.watch.pulse is not None:
            made.watch.pulse.rest()
        raise
    return made


def _tie(made: Context, environment: LaunchEnvironment) -> None:
    """Ties this rank to the others of the run."""
    if made.mesh.world_size > 1:
        _meet_all(made, environment)
    if made.mesh.spreads_model:
        _meet_stages(made)
    if made.mesh.share > 1:
        own = _own_backend(made.config, made.device)
        made.groups.tensor = made.further_group("share", use="parts of layers", backend=own)
        if (inner := made.mesh.inner) is not None:
            made.groups.inner = made.further_group(inner, use="a part of a batch", backend=own)
            outer = made.mesh.outer
            made.groups.outer = made.further_group(outer, use="parts of a batch", backend=own)
    if made.mesh.data > 1:
        _meet_replicas(made)


def _meet_all(made: Context, environment: LaunchEnvironment) -> None:
    """All ranks: they must run the same versions, and those of a host get ways of their own."""
    _say_who_is_trusted(session_of_group(timeout_s=made.config.timeout_s), environment)
    assert made.watch.blame is not None
    made.watch.blame.begin()  # before any rank can wait for this one, and finds a note of an earlier run
    refuse_mixed_versions(tell_all)
    made.watch.pulse = Pulse(made.rank)
    own_address = own_address_towards(environment.master_addr) or ""
    facts = (socket.gethostname(), own_address, tuple(made.watch.pulse.address))
    made.watch.hosts = tuple(
        Host(name, address, PageAddress(*page))
        for name, address, page in _alike_settings(made.mesh, made.config, facts)
    )
    here = made.watch.hosts[made.rank]
    other = next((host for host in made.watch.hosts if host.address and host[:2] != here[:2]), None)
    if other is not None:
        with suppress(OSError):
            made.watch.hosts_answer = other.refuses(_SOON_S)
    made.config = _with_limit_of_first(made.config)
    leave_groups_in_doubt()
    if made.device.type == "cpu" and made.config.shared_memory:
        made.links.local_peers = connect_local_peers(
            timeout_s=made.config.timeout_s, has_stopped=made.watch.blame.has_stopped
        )
    made.links.world = SmallCollectives(
        range(made.mesh.world_size), rank=made.rank, local=made.links.local_peers
    )


def _meet_stages(made: Context) -> None:
    """The ranks of a replica, each with other stages, or parts of them."""
    backend = backend_for(made.device)
    if made.device.type == "cuda" and backend == "gloo":
        raise ConfigError(
            f"a replica of the model is spread over {len(made.replica_ranks)} ranks, and rank {made.rank} "
            "computes on "
            f"{made.device}, but the script has made a process group of gloo, which cannot send what GPUs "
            "hold. Leave the group to sw.init, or make it by "
            'torch.distributed.init_process_group("nccl"). SHARDWRIGHT_DEVICE=cpu keeps ranks on the CPU.'
        )
    made.groups.pipeline = made.further_group("pp", use="collectives of a replica")
    made.groups.model = made.groups.pipeline
    if made.mesh.share > 1:
        made.groups.model = made.further_group("mp", use="collectives of a replica")
    nccl = backend == "nccl"
    # By name: in a step the default group is that of the replicas of a stage (`script_collectives`).
    up = made.further_group("pp", use="activations") if nccl else dist.group.WORLD
    down = made.further_group("pp", use="gradients") if nccl else dist.group.WORLD
    made.links.transport = Transport(
        made.pipeline_ranks, rank=made.pipeline_rank, up=up, down=down, local=made.links.local_peers
    )
    small = partial(SmallCollectives, rank=made.rank, local=made.links.local_peers)
    made.links.stages = small(made.pipeline_ranks, group=made.groups.pipeline)
    made.links.replica = small(made.replica_ranks, group=made.groups.model)


def _meet_replicas(made: Context) -> None:
    """The ranks with the same stages, one in each replica."""
    group: Callable[..., dist.ProcessGroup]
    group = partial(made.further_group, backend=_own_backend(made.config, made.device))
    made.groups.data = group("rdp", use="sums over replicas")
    if made.mesh.shard > 1:
        made.groups.shard = group("dp_shard", use="shards")
        if made.mesh.shard < made.mesh.data:
            made.groups.replica = group("dp_replicate", use="replicas of shards")
    size = made.config.num_updating(made.mesh)
    if size * made.mesh.shard == made.mesh.data:
        made.groups.updating = made.groups.replica if made.mesh.shard > 1 else made.groups.data
    elif size > 1:
        made.groups.updating = group("dp_replicate", use="parts of updates", size=size)


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


_OF_A_RANK = frozenset({"memory_limit", "plan", "report"})
"""Settings that may differ from rank to rank: the first one's counts; a plan file may lie elsewhere."""

_OF_ALL_RANKS = frozenset({"measure_s", "on_nonfinite", "shared_memory"})
"""Settings that the planner does not look at, and that make ranks wait for others that do something else."""

_OF_RECORDED_STEPS = frozenset({"steps", "trace", "log_interval"})
"""Settings that say in which steps the ranks of a pipeline exchange what they measured."""


def _alike_settings(mesh: Mesh, config: Config, facts: Any) -> list[Any]:
    """Refuses ranks that lay each other out in different ways, or plan by others; returns their facts."""
    degrees = f"{mesh.title}, shard {mesh.shard}, placement {mesh.placement}"
    compared = (_OF_ALL_RANKS | _OF_RECORDED_STEPS) if mesh.pipeline > 1 else _OF_ALL_RANKS
    given = {name: value for name, value in config.pins.items() if name not in _OF_A_RANK}
    given |= {name: value for name, value in config.given.items() if name in compared}
    pins = {name: repr(value) for name, value in given.items()}
    told: list[tuple[str, dict[str, str], Any]] = tell_all((degrees, pins, facts))
    rank = next((rank for rank, each in enumerate(told) if each[:2] != told[0][:2]), None)
    if rank is None:
        return [of_rank for *_, of_rank in told]
    (first, settings, _), (other, others, _) = told[0], told[rank]
    if first != other:
        raise ConfigError(
            f"the ranks have different degrees: rank 0 has {first}, and rank {rank} has {other}. "
            "Give sw.init the same settings on every rank."
        )
    name = min(name for name in {*settings, *others} if settings.get(name) != others.get(name))
    values = (each.get(name, "its default") for each in (settings, others))
    raise ConfigError(
        f"the ranks have different settings: {name} is {next(values)} on rank 0, and {next(values)} on rank "
        f"{rank}. Give sw.init the same settings on every rank."
    )


def _with_limit_of_first(config: Config) -> Config:
    """The settings with the first rank's limit on memory, by which all of them decide; collective."""
    limits: list[int | None] = tell_all(config.memory_limit)
    return config.model_copy(update={"memory_limit": limits[0]})


def _own_backend(config: Config, device: torch.device) -> str | None:
    """Shardwright's collectives on CPUs, unless gloo is asked for; None for the backend of the run."""
    on_cpu = device.type == "cpu" and config.ddp_dist_backend == "auto" and config.shared_memory
    return BACKEND if on_cpu else None


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


def _device(local_rank: int) -> torch.device:
    if uses_gpus():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def settings_of_call(config: Any, others: Mapping[str, Any]) -> tuple[Config, Plan | None]:
    """The settings of a script's call of ``init``, and the plan to follow; refuses a second call."""
    refuse_misplaced("sw.init", others, takes=("config",))
    if is_initialized():
        raise UsageError("init was called before. Call it once; shutdown() ends a run.")
    be_brief()
    return given_settings(config)


def begun(
    settings: Config,
    plan: Plan | None,
    *,
    kind: type[_ContextT],
    facts: Callable[[_ContextT], Facts],
    check: Callable[[_ContextT], None] | None = None,
) -> _ContextT:
    """A run of joined ranks, which reports; collective over them."""
    made = joined(settings, plan, kind=kind)
    if check is not None:
        check(made)
    prepare(made)
    made.reporter = Reporter(made, facts(made))
    return made


def shutdown() -> None:
    """Ends a run: a new one can be started with `init`. Process groups stay, for that one too."""
    if is_initialized():
        current = context()
        if current.watch.whereabouts is not None:
            current.watch.whereabouts.close(f"has called {ShardwrightError.library}.shutdown()")
        if current.reporter is not None:
            current.reporter.close()
        current.cleanup.close()  # a save under way is waited for, with messages between ranks
        if current.links.local_peers is not None:
            current.links.local_peers.close()
    set_context(None)


# ---- errors that all ranks have ----


def be_brief() -> None:
    """Has all ranks but the first print errors of this library in one line, which says where they arose.

    `shardwright run` folds the texts of its ranks itself. Under torchrun, srun and mpirun a wrong setting
    would print as many tracebacks as there are ranks.
    """
    rank = next((os.environ[name] for name in _RANKS if os.environ.get(name)), "0")
    if rank == "0" or "SHARDWRIGHT_RUN_DIR" in os.environ or sys.excepthook is not sys.__excepthook__:
        return

    def hook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if isinstance(error, ShardwrightError) and error.__cause__ is None:
            sys.stderr.write(f"[rank {rank}] {_line_of(frames)}{kind.__name__}: {error}\n")
        else:
            sys.__excepthook__(kind, error, frames)

    sys.excepthook = hook


_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def _line_of(frames: TracebackType | None) -> str:
    """The innermost line of the script, and not of a library."""
    script = os.path.dirname(os.path.abspath(sys.argv[0]))
    for frame in reversed(traceback.extract_tb(frames)):
        file = os.path.abspath(frame.filename)
        if file.startswith(script + os.sep) and "site-packages" not in file:
            return f"{os.path.relpath(frame.filename, script)}:{frame.lineno}: "
    return ""
