"""The conditions of a prediction besides stage costs: flows, links, cores, overheads.

The plan file has them, so that a plan can be replayed, under the same conditions or others, on a machine that
has neither the model nor the cluster.
"""

from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, SerializerFunctionWrapHandler, model_serializer

from shardwright.files import Record
from shardwright.files.number_fields import Positive
from shardwright.limits import MOST_RANKS, MOST_RANKS_OF_HOST

__all__ = ["Conditions", "FlowConditions", "LinkConditions", "Seconds"]


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


class LinkConditions(Record):
    """A link between two pipeline ranks, as `shardwright.cluster.Link` has it.

    Attributes:
        latency_s: seconds that a message of no bytes takes.
        bandwidth_Bps: bytes per second; None where bytes take no time.
        occupancy: share of a message's time for which each end cannot compute.
    """

    latency_s: Seconds
    bandwidth_Bps: Positive | None
    occupancy: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0


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

    flows: tuple[FlowConditions, ...] = ()
    hosts: tuple[NonNegativeInt, ...]
    intra_node: LinkConditions
    inter_node: LinkConditions
    host: LinkConditions | None = None
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

    @model_serializer(mode="wrap")
    def _without_newer(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves newer fields out where they are 0: versions that do not know them read such files."""
        found: dict[str, Any] = serialize(self)
        for name in ("settling_s", "forward_overhead_s"):
            if found.get(name) == 0:
                del found[name]
        return found
