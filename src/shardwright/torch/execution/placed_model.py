"""A model whose units have been placed on the ranks of a pipeline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from shardwright.errors import UsageError
from shardwright.runtime.batch_schedules import BatchSchedules
from shardwright.torch.execution.executor import Executor
from shardwright.torch.parameters.residency import Residency
from shardwright.torch.replicas.reducer import GradientReducer
from shardwright.torch.tensor_parallel.group import TensorGroup

__all__ = ["PlacedModel", "parameter_ids"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedModel:
    """A model whose units have been placed on the ranks of a pipeline.

    Attributes:
        residency: the ranks and stages of each parameter.
        executor: runs batches on this rank.
        schedules: the order of work for each kind of batch.
        reducer: sums gradients; None where no other rank has a parameter of this one, or a part of it.
        tensor_group: the ranks that share its layers; None where each rank has whole ones.
        several_stages: parameters of this rank that several stages use, by name.
        parameters: ids of all parameters; None for a single rank.
        sums_nothing: no rank of the run has a trained parameter, or a part of it, that another has: gradients
            are done when the microbatches are.
    """

    residency: Residency
    executor: Executor
    schedules: BatchSchedules
    reducer: GradientReducer | None
    tensor_group: TensorGroup | None
    several_stages: Mapping[str, nn.Parameter]
    parameters: frozenset[int] | None
    sums_nothing: bool

    def refuse_changes(self, modules: Sequence[nn.Module], *, rank: int) -> None:
        """Refuses a model that the script has changed since in a way that other ranks cannot follow.

        Args:
            modules: of the whole model, as it is now.
            rank: this world rank.

        Raises:
            UsageError: parameters were added or replaced.
        """
        if self.parameters is not None and parameter_ids(modules) != self.parameters:
            known = self.parameters
            found = next((n for n, p in modules[0].named_parameters() if id(p) not in known), "one is gone")
            raise UsageError(
                "parameters were added to the model, or replaced, after it was spread over stages and "
                f"replicas, which know nothing of them: {found}, on rank {rank}. Change the "
                "model before the first step."
            )


def parameter_ids(modules: Sequence[nn.Module]) -> frozenset[int]:
    """Ids of all parameters of the modules of a model."""
    return frozenset([id(p) for sub in modules for p in sub._parameters.values() if p is not None])
