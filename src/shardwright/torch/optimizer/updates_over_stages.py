"""Runs an optimizer over the parameters of all stages, where its updates need them all."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwright.comm.identity.purpose import Purpose
from shardwright.errors import NonFiniteError
from shardwright.torch.model.distributed_model import wrapped_model
from shardwright.torch.optimizer.coupling import is_coupled, refuse_coupling
from shardwright.torch.optimizer.joint_update import AllOfGroup, JointUpdate
from shardwright.torch.optimizer.unwrapped_optimizers import leaves_update_out, stepping
from shardwright.torch.replicas.replicas import Replicas
from shardwright.torch.run.context import Context, context, is_initialized

__all__ = ["UpdatesOverStages", "has_stages"]


def has_stages() -> bool:
    """Whether ranks of a replica have some parameters each."""
    return is_initialized() and context().mesh.pipeline > 1


class UpdatesOverStages:
    """Finds the methods of an optimizer that need all parameters, and runs those over all stages.

    Args:
        optimizer: the script's own.
    """

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self._groups: list[AllOfGroup] = []
        self._joint: JointUpdate | None = None
        self._step_is_joint: bool | None = None

    def note_new_groups(self) -> None:
        """Writes down the parameters of new groups, before this rank drops those of other ranks."""
        new = self._optimizer.param_groups[len(self._groups) :]
        self._groups += [(group, list(group["params"])) for group in new]

    def around_step(self) -> AbstractContextManager[None]:
        """Inside, `step` sees all parameters if it needs them; all ranks find the same.

        Raises:
            UsageError: it needs them, and replicas share the parameters, or the work on them.
        """
        current = context() if is_initialized() else None
        if current is None or current.links.replica is None or not has_stages():
            return nullcontext()
        model = wrapped_model()
        if model is None or not model.partitioned:
            return nullcontext()
        if self._step_is_joint is None:
            coupled = is_coupled(
                self._optimizer, groups=self._parameters, if_unknown=not _shares(model.replicas)
            )
            row = torch.tensor([float(coupled)], dtype=torch.float64, device=current.device)
            self._step_is_joint = bool(current.links.replica.gather(row, Purpose.UPDATE).any())
        return self._over_all(current) if self._step_is_joint else nullcontext()

    def method(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method that may update, such as `first_step` of SAM: it sees all parameters if it needs them."""

        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            arguments = (args, kwargs)
            if not is_coupled(self._optimizer, name, groups=self._parameters, arguments=arguments):
                return method(*args, **kwargs)
            if leaves_update_out():
                raise NonFiniteError(
                    "the gradients of the last step are not finite, and its update is to be left out "
                    f"(on_nonfinite). {name}() of {type(self._optimizer).__name__} may be part of an update, "
                    "and cannot be left out alone. Leave out all of them where the loss of a step is not "
                    "finite."
                )
            if (model := wrapped_model()) is not None:
                model.step_end.note(self._optimizer)
            with self._over_all(context()), stepping():
                return method(*args, **kwargs)

        return run

    @property
    def _parameters(self) -> list[Sequence[nn.Parameter]] | None:
        """Those of each group, also of other ranks; None before the model is placed."""
        return [everything for _, everything in self._groups] or None

    def _over_all(self, current: Context) -> AbstractContextManager[None]:
        model = wrapped_model()
        if model is None or not model.partitioned:
            return nullcontext()
        if _shares(model.replicas):
            refuse_coupling(
                self._optimizer,
                "The settings have ranks share parameters or updates, too (sharded_data_parallel_degree, "
                "shard_optimizer_state, bf16 or fp16).",
                "Train by replicas or shards alone (pipeline_parallel_degree 1), by stages without these "
                "settings, or with an optimizer that treats each parameter by itself.",
            )
        if current.mesh.share > 1:
            refuse_coupling(
                self._optimizer,
                f"The settings have {current.mesh.share} ranks share each batch, too ({current.mesh.title}).",
                "Train by stages alone (all other degrees 1), by tensor parallelism without stages "
                "(pipeline_parallel_degree 1), or with an optimizer that treats each parameter by itself.",
            )
        if self._joint is None:
            self._joint = JointUpdate(self._optimizer, self._groups, current)
        return self._joint.running()


def _shares(replicas: Replicas) -> bool:
    """Whether replicas share the parameters, or the work on them."""
    return not (replicas.sharding is None and replicas.updated_parts is None)
