"""Shardwright for PyTorch: ``import shardwright.torch as sw``.

A name is imported when it is asked for, and most of the runtime with the first: ``python train.py --help``,
and the processes of a data loader, do without.
"""

import sys
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwright.after_import import after_import, collector_paused
from shardwright.comm.collectives.backend import register_backend

if TYPE_CHECKING:
    from shardwright.run.context import is_initialized
    from shardwright.run.joining import shutdown
    from shardwright.run.ranks import (
        barrier,
        device,
        dp_rank,
        dp_size,
        get_dp_group,
        get_dp_process_group,
        get_mp_group,
        local_rank,
        local_size,
        mp_rank,
        mp_size,
        pp_rank,
        pp_size,
        rank,
        rdp_rank,
        rdp_size,
        size,
        tp_rank,
        tp_size,
    )
    from shardwright.torch.attention.model_creation import model_creation
    from shardwright.torch.backward.activation_checkpointing import set_activation_checkpointing
    from shardwright.torch.batch.step_output import StepOutput
    from shardwright.torch.checkpoints.checkpoints import Checkpoints
    from shardwright.torch.data import ReplicaLoader, data_loader, distributed_sampler, seed_everything
    from shardwright.torch.interception.step_code import is_tracing
    from shardwright.torch.loss_scale import GradScaler
    from shardwright.torch.model.distributed_model import DistributedModel
    from shardwright.torch.optimizer.clipping import clip_grad_norm_
    from shardwright.torch.optimizer.distributed_optimizer import DistributedOptimizer
    from shardwright.torch.parameters.delayed_initialization import delay_param_initialization
    from shardwright.torch.parameters.unit_map import partition, set_partition
    from shardwright.torch.startup import add_tracker, init, notebook_launcher
    from shardwright.torch.step_function import step
    from shardwright.torch.streams import StreamLoader
    from shardwright.torch.units.dry_run import trace_model

__all__ = [
    "Checkpoints",
    "DistributedModel",
    "DistributedOptimizer",
    "GradScaler",
    "ReplicaLoader",
    "StepOutput",
    "StreamLoader",
    "add_tracker",
    "barrier",
    "clip_grad_norm_",
    "data_loader",
    "delay_param_initialization",
    "device",
    "distributed_sampler",
    "dp_rank",
    "dp_size",
    "get_dp_group",
    "get_dp_process_group",
    "get_mp_group",
    "init",
    "is_initialized",
    "is_tracing",
    "local_rank",
    "local_size",
    "model_creation",
    "mp_rank",
    "mp_size",
    "notebook_launcher",
    "partition",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_rank",
    "rdp_size",
    "seed_everything",
    "set_activation_checkpointing",
    "set_partition",
    "shutdown",
    "size",
    "step",
    "tp_rank",
    "tp_size",
    "trace_model",
]

_MODULES = {
    "run.context": "is_initialized",
    "run.ranks": (
        "barrier device dp_rank dp_size get_dp_group get_dp_process_group get_mp_group local_rank local_size "
        "mp_rank mp_size pp_rank pp_size rank rdp_rank rdp_size size tp_rank tp_size"
    ),
    "run.joining": "shutdown",
    "torch.attention.model_creation": "model_creation",
    "torch.backward.activation_checkpointing": "set_activation_checkpointing",
    "torch.batch.step_output": "StepOutput",
    "torch.checkpoints.checkpoints": "Checkpoints",
    "torch.data": "ReplicaLoader data_loader distributed_sampler seed_everything",
    "torch.interception.step_code": "is_tracing",
    "torch.loss_scale": "GradScaler",
    "torch.model.distributed_model": "DistributedModel",
    "torch.startup": "add_tracker init notebook_launcher",
    "torch.optimizer.clipping": "clip_grad_norm_",
    "torch.optimizer.distributed_optimizer": "DistributedOptimizer",
    "torch.parameters.delayed_initialization": "delay_param_initialization",
    "torch.parameters.unit_map": "partition set_partition",
    "torch.step_function": "step",
    "torch.streams": "StreamLoader",
    "torch.units.dry_run": "trace_model",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    path = f"shardwright.{_MODULE_OF[name]}"
    with nullcontext() if path in sys.modules else collector_paused():
        module = import_module(path)
    found = globals()[name] = getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})


def _models_watched(_: Any) -> None:
    import_module(f"{__name__}.attention.model_creation")


register_backend()
after_import("transformers.modeling_utils", _models_watched)
del register_backend
