"""``tsm.init``, its settings and ranks; how FSDP takes them; what a model is told before it is wrapped."""

import functools
import inspect
import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from shardwright.errors import ConfigError, UsageError
from shardwright.launch.ranks.smp_parameters import read_smp_parameters

_VARIABLE = "SM_HP_MP_PARAMETERS"
_DEFAULTS: dict[str, Any] = {
    "hybrid_shard_degree": 0,
    "sm_activation_offloading": True,
    "activation_loading_horizon": 2,
    "fsdp_cache_flush_warnings": True,
    "allow_empty_shards": False,
    "tensor_parallel_degree": 1,
    "context_parallel_degree": 1,
    "expert_parallel_degree": 1,
    "random_seed": 12345,
}
_DIVIDING = ("tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree")


def init(config: Mapping[str, Any] | str | os.PathLike[str] | None = None) -> None:
    """Takes the settings; joins the ranks, where the script has not done so.

    Args:
        config: a dictionary or the path of a JSON file; ``SM_HP_MP_PARAMETERS`` overrides its keys.
    """
    if is_initialized():
        return
    given = {} if config is None else read_smp_parameters(config)
    if text := os.environ.get(_VARIABLE, "").strip():
        given |= read_smp_parameters(text)
    if not dist.is_initialized():
        if "RANK" in os.environ:
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        else:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    state._start(_checked(given, dist.get_world_size()))
    _let_fsdp_know()


def is_initialized() -> bool:
    """Whether `init` was called."""
    return state._settings is not None


def _checked(given: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    for key in (key for key in given if key not in _DEFAULTS):
        close = get_close_matches(key, _DEFAULTS, n=1)
        advice = f" Did you mean {close[0]}?" if close else ""
        warnings.warn(f"{key} is no setting of SMP v2, and is passed over.{advice}", stacklevel=3)
    settings = _DEFAULTS | {key: value for key, value in given.items() if key in _DEFAULTS}
    for key, default in _DEFAULTS.items():
        value = settings[key]
        if type(value) is not type(default) or value < 0:
            kind = "true or false" if isinstance(default, bool) else "a number from 0"
            raise ConfigError(f"{key} is {value!r}, but it must be {kind}. The default is {default}.")
    for key in _DIVIDING:
        if settings[key] != 1:
            raise ConfigError(
                f"{key} is {settings[key]}, but torch.sagemaker trains here by PyTorch's FSDP alone, which "
                f"divides no layers. Set it to 1, or use {key} of Shardwright itself, with "
                "sw.DistributedModel in place of FSDP: docs/coming_from.md."
            )
    degree = settings["hybrid_shard_degree"]
    if degree and world_size % degree:
        raise ConfigError(
            f"hybrid_shard_degree({degree}) must divide the number of ranks, but {world_size} are running. "
            "Use one that does, or 0: then the arguments of FSDP count."
        )
    return settings


class _Ranker:
    """Which ranks hold the same shards: those with the same number in their shard groups."""

    def __init__(self, degree: int, world_size: int):
        self._degree = degree
        self._world_size = world_size

    def get_rep_rank(self, rank: int) -> int:
        """The number of the replica that a rank belongs to."""
        return rank // self._degree

    def get_rep_groups(self) -> list[list[int]]:
        """The ranks with the same shard, for each shard."""
        return [list(range(first, self._world_size, self._degree)) for first in range(self._degree)]


class _State:
    """``tsm.state``: settings under their names, and this rank among the others."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets what `init` was told, so that it may be called again; process groups stay."""
        self._settings: dict[str, Any] | None = None
        self._found: dict[str, Any] = {}

    def _start(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        rank, size = dist.get_rank(), dist.get_world_size()
        degree = settings["hybrid_shard_degree"] or size
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        mesh = init_device_mesh(kind, (size // degree, degree), mesh_dim_names=("replicate", "shard"))
        alone = {f"{part}_{what}": number for part in ("tp", "ep", "cp") for what, number in _ALONE.items()}
        self._found = {
            "cfg": dict(settings),
            "rank": rank,
            "global_rank": rank,
            "world_size": size,
            "world_process_group": dist.group.WORLD,
            "rep_rank_process_group": mesh.get_group("replicate"),
            "ranker": _Ranker(degree, size),
            "mesh": mesh,
            "groups_for_writing": {},
            **alone,
        }

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._settings is None:
            raise UsageError(f"tsm.state.{name} is known after tsm.init(). Call it first, on every rank.")
        if name in self._settings:
            return self._settings[name]
        if name in self._found:
            return self._found[name]
        raise AttributeError(f"tsm.state.{name} is not here. There are: {', '.join(sorted(self._found))}.")


_ALONE = {"size": 1, "rank": 0}  # no rank shares a layer with another
state = _State()


# ---- FSDP ----


def _let_fsdp_know() -> None:
    """Has FSDP take ``post_param_init_fn``, and the groups of `hybrid_shard_degree`."""
    plain = FullyShardedDataParallel.__init__
    if hasattr(plain, "of_sagemaker"):
        return
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def __init__(self: Any, *args: Any, post_param_init_fn: Any = None, **kwargs: Any) -> None:  # noqa: N807
        bound = signature.bind(self, *args, **kwargs)
        with _quiet_about_strategies():
            plain(**(bound.arguments | (_of_degree(bound.arguments) if is_initialized() else {})))
        if post_param_init_fn is not None:
            post_param_init_fn(self)

    __init__.of_sagemaker = True  # type: ignore[attr-defined]
    FullyShardedDataParallel.__init__ = __init__  # type: ignore[method-assign]


def _of_degree(given: Mapping[str, Any]) -> dict[str, Any]:
    """What `hybrid_shard_degree` puts in place of the script's arguments; nothing at 0."""
    degree: int = state.hybrid_shard_degree
    if degree == 0:
        return {}
    zero_2 = ShardingStrategy._HYBRID_SHARD_ZERO2
    keeps = given.get("sharding_strategy") in (zero_2, ShardingStrategy.SHARD_GRAD_OP)
    mesh: DeviceMesh = state.mesh
    strategy = zero_2 if keeps else ShardingStrategy.HYBRID_SHARD
    # With a mesh, `process_group` must be None, also for units, which get that of the whole.
    found: dict[str, Any] = {"sharding_strategy": strategy, "device_mesh": mesh, "process_group": None}
    if degree == 1:
        found = {"sharding_strategy": ShardingStrategy.NO_SHARD}
    makes_values = given.get("param_init_fn") is not None and given.get("device_id") is not None
    if makes_values and mesh.size(0) > 1 and torch.cuda.is_available():  # FSDP refuses it for CPUs
        found["sync_module_states"] = True  # else replicas with seeds of their own would begin differently
    return found


@contextmanager
def _quiet_about_strategies() -> Iterator[None]:
    """PyTorch would advise to write DistributedDataParallel in place of what the settings ask for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*NO_SHARD.*", category=FutureWarning)
        yield


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Clips the gradients by their norm over all ranks; gives the norm. `model`: FSDP's, or a plain one."""
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(max_norm, norm_type)
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)


# ---- the model ----


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Settings for SMP's own layers of experts."""

    smp_moe: bool = True
    random_seed: int = 12345
    moe_load_balancing: str = "sinkhorn"
    global_token_shuffle: bool = False
    moe_all_to_all_dispatcher: bool = True
    moe_aux_loss_coeff: float = 0.001
    moe_z_loss_coeff: float = 0.001
    use_cpu_initialization: bool = False


def transform(
    model: nn.Module,
    device: Any = None,
    dtype: torch.dtype | None = None,
    config: MoEConfig | None = None,
    load_state_dict_from_rank0: bool = False,
    cp_comm_type: str = "p2p",
) -> nn.Module:
    """The model, which stays as it is: no degree divides its layers.

    Args:
        device: where its tensors shall be; those on the meta device stay there. `dtype` likewise.
    """
    if not is_initialized():
        raise UsageError("tsm.transform needs the settings. Call tsm.init() first, on every rank.")
    if config is not None and config.smp_moe:
        raise UsageError(
            "tsm.transform with MoEConfig replaces experts and router by layers of SMP, which are not here. "
            "Leave config= out, and those of the model train; Shardwright divides them over ranks itself: "
            "expert_parallel_degree in docs/coming_from.md."
        )
    if load_state_dict_from_rank0:
        _take_values_of_rank_0(model)
    for tensor in (*model.parameters(), *model.buffers()):
        kind = dtype if tensor.is_floating_point() else None
        tensor.data = tensor.data.to(device=None if tensor.is_meta else device, dtype=kind)
    return model


@torch.no_grad()
def _take_values_of_rank_0(model: nn.Module) -> None:
    here = "cuda" if torch.cuda.is_available() else "cpu"
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter.is_meta:  # tied weights become one again
                new = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
                setattr(module, name, made.setdefault(id(parameter), new))
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        sent = tensor.detach().to(here)
        dist.broadcast(sent, 0)
        tensor.copy_(sent)


# ---- small ones ----


def get_logger(name: str = "smp") -> logging.Logger:
    """A logger of the script."""
    return logging.getLogger(name)


def get_global_ranks(process_group: dist.ProcessGroup | None = None) -> Iterable[int]:
    """The ranks of a group, numbered as in the whole job."""
    return dist.get_process_group_ranks(process_group)
