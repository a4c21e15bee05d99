"""The protocol of a model that engines, and the end of a step, rely on."""

from collections.abc import Iterator
from typing import Protocol

from torch import nn

from shardwright.torch.loss_scale import GradientScaling
from shardwright.torch.parameters.residency import Residency
from shardwright.torch.pytorch.modules import ModelTree
from shardwright.torch.replicas.replicas import Replicas


class TrainedModel(Protocol):
    """The wrapped model: see `DistributedModel`.

    Attributes:
        average_grads_across_microbatches: whether a microbatch counts as much as its share of the batch.
        tree: its modules and parameters, as they are now.
        replicas: what replicas share.
        scaling: of losses; None without.
        labels_a_sample: about how many labels of a sample count, a power of two; alike on all ranks, 0 as
            long as no replicas need it.
    """

    average_grads_across_microbatches: bool
    tree: ModelTree
    replicas: Replicas
    scaling: GradientScaling | None
    labels_a_sample: float

    @property
    def partitioned(self) -> bool:
        """Whether ranks have taken their parts."""

    @property
    def waits_to_settle(self) -> bool:
        """Whether a state, or a hook, waits for the parts of this rank."""

    def get_module(self) -> nn.Module:
        """The script's own module."""

    @property
    def loss_scale(self) -> float:
        """The factor on losses."""

    def placed(self, residency: Residency) -> bool:
        """Records where parameters live; says whether the model is as it was."""

    def settle(self) -> None:
        """Called once this rank has only the parameters that it trains."""

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank."""

    def stage_of(self, name: str) -> int:
        """The stage of a parameter."""
