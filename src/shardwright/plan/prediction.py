"""The conditions of a prediction besides stage costs: flows, links, cores, overheads.

The plan file has them, so that a plan can be replayed, under the same conditions or others, on a machine that
has neither the model nor the cluster.
"""

from dataclasses import fields
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt

from shardwright.cluster import Link
from shardwright.files import Record
from shardwright.files.user_file import Positive, Share
from shardwright.profile import Cost
from shardwright.quantities import MOST_RANKS, MOST_RANKS_OF_HOST

Seconds = Annotated[float, Field(ge=0.0, le=1e12, allow_inf_nan=False)]


class FlowConditions(Record):
    """The data that one stage sends to another for one microbatch.

    Attributes:
        target: the stage that receives; larger than `source`.
        num_bytes: bytes sent forward.
        gradient_bytes: bytes of gradients sent back; 0 where none returns.
    """

    source: NonNegativeInt
    target: NonNegativeInt
    num_bytes: NonNegativeInt
    gradient_bytes: NonNegativeInt = 0


class Conditions(Record):
    """The conditions of a plan's simulated step.

    Attributes:
        hosts: the host of each pipeline rank of the first replica.
        intra_node: link between two ranks of a host.
        host: from each rank to where it offloads what units keep; None where that is not known.
        cores: CPU cores that the ranks of one replica share on a host; 0 where each has a device.
        ranks_per_node: pipeline ranks of one replica on a host.
        crowding: how much longer ranks compute because several replicas share a host's cores; 1 or more.
        action_overhead_s: seconds that every action takes on top.
        forward_overhead_s: seconds that every forward takes on top of that, for what its rank runs of the
            step function beside computing.
        step_overhead_s: seconds before the first action of a step and after the last one.
        tie_s: the part of ``sync_s`` in which parameters of several stages are summed.
        settling_s: the part of ``sync_s`` in which tensor-parallel ranks sum gradients of whole parameters.
        sync_latency_s: the part of ``sync_s`` that stays however fast bytes travel.
        hidden_s: what sums over replicas take beyond ``sync_s``, while ranks compute.
        window_s: seconds of computing that can hide sums.
        memory_limit_bytes: memory that a rank may use; 0: no limit was known.
    """

    left_out: ClassVar = ("settling_s", "forward_overhead_s")

    flows: tuple[FlowConditions, ...] = ()
    hosts: tuple[NonNegativeInt, ...]
    intra_node: Link
    inter_node: Link
    host: Link | None = None
    cores: Annotated[int, Field(ge=0, le=MOST_RANKS_OF_HOST)] = 0
    ranks_per_node: Annotated[int, Field(ge=1, le=MOST_RANKS)] = 1
    crowding: Positive = 1.0
    action_overhead_s: Seconds = 0.0
    forward_overhead_s: Seconds = 0.0
    step_overhead_s: Seconds = 0.0
    tie_s: Seconds = 0.0
    settling_s: Seconds = 0.0
    sync_latency_s: Seconds = 0.0
    hidden_s: Seconds = 0.0
    window_s: Seconds = 0.0
    memory_limit_bytes: NonNegativeInt = 0


class StagePrediction(Record):
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

    left_out: ClassVar = ("forward_exchange_s", "backward_exchange_s", "exchange_bytes")

    forward_s: Seconds
    backward_s: Seconds
    weight_s: Seconds = 0.0
    input_s: Seconds | None = None
    saved_bytes: NonNegativeInt = 0
    weight_bytes: NonNegativeInt | None = None
    recompute_s: Seconds = 0.0
    offload_bytes: NonNegativeInt = 0
    window_bytes: NonNegativeInt = 0
    tail_bytes: NonNegativeInt = 0
    send_bytes: NonNegativeInt = 0
    parameter_bytes: NonNegativeInt = 0
    forward_exchange_s: Seconds = 0.0
    backward_exchange_s: Seconds = 0.0
    exchange_bytes: NonNegativeInt = 0

    @property
    def cost(self) -> Cost:
        """Its part that any cost has."""
        return Cost(**{each.name: getattr(self, each.name) for each in fields(Cost)})


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
        conditions: what the step was simulated with.
    """

    left_out: ClassVar = ("alone_s", "replicas_s")

    step_s: Seconds
    sync_s: Seconds = 0.0
    bubble: Share
    stages: tuple[StagePrediction, ...]
    memory: tuple[MemoryPrediction, ...]
    provenance: Literal["measured", "estimated"]
    update_s: Seconds = 0.0
    error: Seconds = 0.0
    alone_s: Seconds = 0.0
    replicas_s: Seconds = 0.0
    conditions: Conditions
