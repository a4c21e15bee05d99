"""The beginning of a run: ``smp.init``."""

import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

import shardwright.torch as sw
from shardwright.comm.identity.environment import detect
from shardwright.comm.joining.process_group import group_of, init_process_group
from shardwright.errors import ConfigError, UsageError, library_named
from shardwright.torch.script_run import ScriptRun, script_run
from smdistributed.modelparallel.configuration import Configuration, read_configuration
from smdistributed.modelparallel.launcher_parameters import contradictions
from smdistributed.modelparallel.torch.partition_file import settings_with_partition
from smdistributed.modelparallel.torch.random_states import let_trainer_load
from smdistributed.modelparallel.torch.state_mod import current_run, state

__all__ = ["init", "is_initialized", "num_microbatches", "shutdown"]


def init(config: Mapping[str, Any] | None = None) -> None:
    """Starts a run; call it first, once on every rank.

    Called again without settings, or with the same ones, it does nothing.

    Args:
        config: settings by their names in SageMaker's library. ``SM_HP_MP_PARAMETERS`` wins over them.

    Raises:
        ConfigError: settings contradict each other, or ask for what is not there yet.
        UsageError: it was called before with other settings.
    """
    configuration = read_configuration(config, os.environ, sys.argv[1:])
    if state.initialized:
        if config is not None and configuration != state.configuration:
            raise UsageError(
                "smp.init was called before, with other settings, and a run has one set of them. Call it "
                "once; smp.is_initialized() tells whether it was called."
            )
        return
    sw.init(settings_with_partition(configuration.settings, configuration.values))
    let_trainer_load()
    current = script_run()
    current.cleanup.enter_context(library_named("smp"))
    try:
        remarks = [*configuration.remarks, *_remarks_on(current, configuration)]
        _prepare_groups(current, configuration)
    except BaseException:
        sw.shutdown()
        raise
    if current.rank == 0:
        for remark in remarks:
            warnings.warn(remark, stacklevel=2)


def _remarks_on(current: ScriptRun, configuration: Configuration) -> list[str]:
    """What a user should know of settings whose effect depends on ranks and devices."""
    remarks = contradictions(os.environ, local_size=current.local_size)
    values = configuration.values
    if values["offload_activations"]:
        if current.device.type != "cpu":
            raise ConfigError(
                f"offload_activations is True, but moving activations from {current.device.type} to the host "
                "is not there yet. Set it to False; smp.set_activation_checkpointing saves most of the same "
                "memory."
            )
        remarks.append(
            "offload_activations is accepted, and changes nothing here: activations are in the memory of the "
            "host already."
        )
    if current.mesh.data > 1 and not values["ddp"]:
        remarks.append(
            f"ddp is not set, and there are {current.mesh.data} replicas: their gradients are averaged, as "
            "with ddp True."
        )
    return remarks


def _prepare_groups(current: ScriptRun, configuration: Configuration) -> None:
    """Makes groups that scripts ask for, or use without asking."""
    if not dist.is_initialized():  # a single rank; scripts call torch.distributed.barrier() on it, too
        backend = "gloo" if current.device.type == "cpu" else "cpu:gloo,cuda:nccl"
        init_process_group(detect(os.environ), backend=backend, timeout_s=current.config.timeout_s)
    objects = None
    if current.mesh.world_size > 1:
        objects = group_of(
            tuple(range(current.mesh.world_size)),
            use="objects of smp",
            timeout_s=current.config.timeout_s,
            backend="gloo",
        )
    state.begin(configuration, objects)


def shutdown() -> None:
    """Ends a run, so that another one can begin in this process."""
    sw.shutdown()
    state.reset()


def is_initialized() -> bool:
    """Whether ``smp.init`` was called."""
    return state.initialized


def num_microbatches() -> int:
    """The number of parts into which each batch is split."""
    return current_run().config.microbatches or 1
