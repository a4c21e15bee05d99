"""The ranks of the run that ``smp.init`` has begun: settings, and groups for objects and collectives.

No framework's models are known here: the modules of PyTorch and of TensorFlow share it.
"""

import os
from typing import Any

import torch.distributed as dist

from shardwright.comm.joining.process_group import group_of, init_process_group
from shardwright.comm.launchers import detect
from shardwright.errors import UsageError
from shardwright.run.context import Context, context, is_initialized
from smdistributed.modelparallel.backend.exceptions import NotInitializedError
from smdistributed.modelparallel.configuration import Configuration
from smdistributed.modelparallel.launcher_parameters import contradictions


class RanksOfRun:
    """The one run of this process.

    Attributes:
        configuration: the settings that ``smp.init`` read; None before.
        stage_group: the ranks of this stage, where these are several replicas of several ranks each.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets the run."""
        self.configuration: Configuration | None = None
        self._objects_group: dist.ProcessGroup | None = None
        self._lost_object = ""
        self._alone: dist.ProcessGroup | None = None
        self.stage_group: dist.ProcessGroup | None = None

    def begin(self, configuration: Configuration) -> None:
        """Takes note of a run that `shardwright` has begun; makes the groups that scripts use or ask for."""
        self.reset()
        current = context()
        timeout_s = current.config.timeout_s
        if not dist.is_initialized():  # a single rank; scripts call torch.distributed.barrier() on it, too
            backend = "gloo" if current.device.type == "cpu" else "cpu:gloo,cuda:nccl"
            init_process_group(detect(os.environ), backend=backend, timeout_s=timeout_s)
        if current.mesh.world_size > 1:
            everyone = tuple(range(current.mesh.world_size))
            self._objects_group = group_of(
                everyone, use="objects of smp", timeout_s=timeout_s, backend="gloo"
            )
        if current.mesh.tensor > 1 and current.mesh.data > 1:
            self.stage_group = current.further_group("dp", use="the ranks of a stage")
        self.configuration = configuration

    @property
    def initialized(self) -> bool:
        """Whether ``smp.init`` was called."""
        return is_initialized() and self.configuration is not None

    def is_begun_with(self, configuration: Configuration, *, given: bool) -> bool:
        """Whether ``smp.init`` was called before, so that nothing is left to do."""
        if not self.initialized:
            return False
        if given and configuration != self.configuration:
            raise UsageError(
                "smp.init was called before, with other settings, and a run has one set of them. Call it "
                "once; smp.is_initialized() tells whether it was called."
            )
        return True

    @property
    def objects_group(self) -> dist.ProcessGroup:
        present_run()
        if self._lost_object:
            raise UsageError(
                f"no object can be sent or received any more after {self._lost_object}. End the script, and "
                "see to it that ranks call smp.send(), smp.recv_from() and smp.broadcast() in the same order."
            )
        assert self._objects_group is not None
        return self._objects_group

    def lose_objects(self, call: str) -> None:
        """Takes note of a call whose object is still under way."""
        self._lost_object = call

    def alone(self) -> dist.ProcessGroup:
        if self._alone is None:
            self._alone = dist.new_group([present_run().rank], use_local_synchronization=True)
        return self._alone

    def remarks(self) -> list[str]:
        """What a user should know of settings, one sentence each."""
        current, configuration = present_run(), self.configuration
        assert configuration is not None
        values: Any = configuration.values
        found = [*configuration.remarks, *contradictions(os.environ, local_size=current.local_size)]
        if current.mesh.data > 1 and not values["ddp"] and not values["horovod"]:
            found.append(
                f"ddp is not set, and there are {current.mesh.data} replicas: their gradients are averaged, "
                "as with ddp True."
            )
        return found


ranks_of_run = RanksOfRun()


def present_run() -> Context:
    """The run that ``smp.init`` began."""
    if not ranks_of_run.initialized:
        raise NotInitializedError(
            "smdistributed.modelparallel is not initialised: smp.init() was not called. Call it first, once "
            "on every rank, before models, optimizers and questions about ranks."
        )
    return context()
