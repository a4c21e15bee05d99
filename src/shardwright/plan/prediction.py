"""The prediction of a plan: seconds and bytes of stages, memory of ranks, the whole step."""

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, SerializerFunctionWrapHandler, model_serializer

from shardwright.files import Record
from shardwright.plan.conditions import Conditions, Seconds
from shardwright.profile import Cost

__all__ = ["CostRecord", "MemoryPrediction", "Prediction", "StagePrediction"]

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class CostRecord(Record):
    """A `Cost` in a file."""

    forward_s: Seconds
    backward_s: Seconds
    weight_s: Seconds = 0.0
    input_s: Seconds | None = None
    saved_bytes: NonNegativeInt = 0
    weight_bytes: NonNegativeInt | None = None

    @property
    def cost(self) -> Cost:
        """The seconds and bytes."""
        return Cost(**{each.name: getattr(self, each.name) for each in fields(Cost)})


class StagePrediction(CostRecord):
    """Predicted cost of one stage for one microbatch, recomputation in its backward.

    Attributes:
        recompute_s: the part of `backward_s` that is recomputation.
        offload_bytes: that leave for the host unit by unit and come back, not among `saved_bytes`.
        window_bytes: of them, the most that are there while an action runs.
        tail_bytes: of these, what leaves behind the forward, and comes back ahead of the backward.
        send_bytes: that it sends forward.
        parameter_bytes: of its parameters and buffers, on one rank.
        forward_exchange_s, backward_exchange_s: the parts of the seconds in which ranks of a tensor-parallel
            group exchange.
        exchange_bytes: that one of them sends meanwhile.
    """

    recompute_s: Seconds = 0.0
    offload_bytes: NonNegativeInt = 0
    window_bytes: NonNegativeInt = 0
    tail_bytes: NonNegativeInt = 0
    send_bytes: NonNegativeInt = 0
    parameter_bytes: NonNegativeInt = 0
    forward_exchange_s: Seconds = 0.0
    backward_exchange_s: Seconds = 0.0
    exchange_bytes: NonNegativeInt = 0

    @model_serializer(mode="wrap")
    def _without_exchange(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves the exchange out where there is none: versions that do not know it read such files."""
        found: dict[str, Any] = serialize(self)
        if not (self.exchange_bytes or self.forward_exchange_s or self.backward_exchange_s):
            for name in ("forward_exchange_s", "backward_exchange_s", "exchange_bytes"):
                found.pop(name, None)
        return found


class MemoryPrediction(Record):
    """Predicted peak memory of one pipeline rank.

    Attributes:
        parameters_bytes: of its parameters and buffers.
        gradients_bytes: of their gradients, as many as there are at the peak.
        optimizer_bytes: of what the optimizer keeps.
        activations_bytes: of what all microbatches in flight keep, at most.
        batch_bytes: of the tensors of a batch.
        work_bytes: of temporaries and messages.
    """

    parameters_bytes: NonNegativeInt
    gradients_bytes: NonNegativeInt
    optimizer_bytes: NonNegativeInt
    activations_bytes: NonNegativeInt
    batch_bytes: NonNegativeInt = 0
    work_bytes: NonNegativeInt = 0

    @property
    def peak_bytes(self) -> int:
        """Sum of all parts."""
        state = self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes
        return state + self.activations_bytes + self.batch_bytes + self.work_bytes


class Prediction(Record):
    """The simulator's prediction.

    Attributes:
        step_s: seconds of one batch: forward, backward, the sums of gradients over ranks, what the runtime
            does before and after; not the optimizer's.
        sync_s: the part of them in which gradients are summed.
        bubble: idle share of the ranks' time, 0 to 1.
        stages: cost of each stage.
        memory: peak memory of each pipeline rank.
        provenance: whether the costs were measured or estimated.
        update_s: seconds of the optimizer's update, on the rank that has most to update; 0: not known.
        error: half of the interval around `step_s` that holds nine of ten runs, relative; 0: not known.
        alone_s: seconds of the same batch in one process; 0: not known, or it does not fit.
        replicas_s: the same where each rank is a replica with a batch of its own; 0: not known, or they do
            not fit.
        conditions: what the step was simulated with; None in plans of versions that did not keep it.
    """

    step_s: Seconds
    sync_s: Seconds = 0.0
    bubble: Fraction
    stages: tuple[StagePrediction, ...]
    memory: tuple[MemoryPrediction, ...]
    provenance: Literal["measured", "estimated"]
    update_s: Seconds = 0.0
    error: Seconds = 0.0
    alone_s: Seconds = 0.0
    replicas_s: Seconds = 0.0
    conditions: Conditions | None = None

    @model_serializer(mode="wrap")
    def _without_newer(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves newer fields out where they are 0: versions that do not know them read such files."""
        found: dict[str, Any] = serialize(self)
        for name in ("alone_s", "replicas_s"):
            if found.get(name) == 0:
                del found[name]
        return found
