"""Shardwright for PyTorch: ``import shardwright.torch as sw``."""

from shardwright.comm.backend.registration import register_backend
from shardwright.torch.attention.model_creation import model_creation
from shardwright.torch.backward.activation_checkpointing import set_activation_checkpointing
from shardwright.torch.batch.step_output import StepOutput
from shardwright.torch.checkpoints.checkpoints import Checkpoints
from shardwright.torch.interception.trace_marker import is_tracing
from shardwright.torch.loss_scale.grad_scaler import GradScaler
from shardwright.torch.model.distributed_model import DistributedModel
from shardwright.torch.notebook import notebook_launcher
from shardwright.torch.optimizer.clipping import clip_grad_norm_
from shardwright.torch.optimizer.distributed_optimizer import DistributedOptimizer
from shardwright.torch.parameters.delayed_initialization import delay_param_initialization
from shardwright.torch.parameters.manual_partition import partition, set_partition
from shardwright.torch.run.context import is_initialized
from shardwright.torch.run.data import distributed_sampler, seed_everything
from shardwright.torch.run.data_loader import ReplicaLoader, data_loader
from shardwright.torch.run.ranks import (
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
from shardwright.torch.startup import add_tracker, init, shutdown
from shardwright.torch.step import step
from shardwright.torch.units.dry_run import trace_model

__all__ = [
    "Checkpoints",
    "DistributedModel",
    "DistributedOptimizer",
    "GradScaler",
    "ReplicaLoader",
    "StepOutput",
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

register_backend()
del register_backend
