"""Devices, their memory and rates, and the links between them: of a run, and of machines to choose from.

A `Cluster` is one run's view of its machines, rank by rank. An `Inventory` comes before: kinds of nodes with
data-sheet or measured rates, and the number of each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from shardwright.files.user_file import NUMBER, Bytes, NonNegative, NumBytes, Positive, Seconds, Share
from shardwright.quantities import MOST_BYTES, MOST_RANKS_OF_HOST

Count = Annotated[int, Field(ge=1, le=2**40)]
_MOST_ACCELERATORS = 1024  # of a node


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device of one rank.

    Attributes:
        family: of accelerators, for which finer shares of the rates are calibrated; empty: unknown.
        memory_bytes: memory that one rank may use; 0 means unknown (no limit is checked).
        flops_per_s: peak rate of a large matrix product in the model's dtype.
        reached: share of it that products reach; 1 where it was measured, and is no peak of a data sheet.
        memory_Bps: bytes of its memory that kernels read and write a second.
        overhead_s: time that one unit call takes however small it is.
        update_Bps: bytes of parameters that the optimizer updates a second; 0 where it was not measured.
        update_s: seconds that it takes for each parameter, however small.
    """

    name: str
    family: str = ""
    memory_bytes: Bytes = 0
    flops_per_s: Positive = 5e10
    reached: Share = 0.7
    memory_Bps: Positive = 1e10
    overhead_s: Seconds = 2e-5
    update_Bps: NonNegative = 0.0
    update_s: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection between two ranks: a message of n bytes takes ``latency_s + n / bandwidth_Bps``.

    Attributes:
        latency_s: seconds that a message of no bytes takes.
        bandwidth_Bps: bytes per second of a large one.
        occupancy: share of that time for which each end cannot compute, because its core copies the message:
            near 1 for ranks of one host that talk over sockets, 0 where the network card does the work.
    """

    latency_s: Seconds
    bandwidth_Bps: Positive
    occupancy: Share = 0.0

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bandwidth_Bps


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """Seconds that the library itself takes on a rank, however small the model is.

    A rank runs all of the step function for each microbatch: calls and operations count on every rank,
    whoever computes them.

    Attributes:
        step_s: of a step, before its first action and after its last one.
        action_s: of a forward or a backward, with the messages around it.
        unit_s: of a call of a unit, of the whole model.
        operation_s: of an operation between units, of the whole step function.
    """

    step_s: Seconds
    action_s: Seconds
    unit_s: Seconds = 0.0
    operation_s: Seconds = 0.0

    def script_s(self, *, units: int, operations: int) -> float:
        """What the step function takes for a microbatch beside computing."""
        return units * self.unit_s + operations * self.operation_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machines that run a job.

    Attributes:
        cores_per_node: CPU cores that the ranks of one host share when the devices are CPUs; 0 when every
            rank has a device of its own (GPUs). With more active ranks than cores, each runs slower in
            proportion.
        intra_node: link between two ranks of one host.
        host: from each rank to where it offloads what units keep, all ranks of a host at once: pinned memory,
            or a disk; occupancy is that of a rank without a core to spare. None: not known.
        host_costs: of the library where ranks share a model; None: the usual ones.
        loop_costs: the same where each rank has all of it; None: the usual ones.
        slowness: for each host, how many times as long its ranks compute as costs say; empty: as long. Costs
            that all ranks have measured together are means; those of `cluster_of` are of the slowest host.
    """

    device: Device
    ranks_per_node: Annotated[int, Field(ge=1, le=MOST_RANKS_OF_HOST)]
    cores_per_node: Annotated[int, Field(ge=0, le=MOST_RANKS_OF_HOST)] = 0
    intra_node: Link
    inter_node: Link
    host: Link | None = None
    host_costs: HostCosts | None = None
    loop_costs: HostCosts | None = None
    slowness: tuple[Positive, ...] = ()

    def link(self, rank_a: int, rank_b: int) -> Link:
        """The link between two world ranks, which are numbered host by host."""
        same_host = rank_a // self.ranks_per_node == rank_b // self.ranks_per_node
        return self.intra_node if same_host else self.inter_node

    def slowness_of(self, rank: int) -> float:
        """The factor on the seconds of a world rank's computing; 1 for unknown hosts."""
        host = rank // self.ranks_per_node
        return self.slowness[host] if host < len(self.slowness) else 1.0


Source = Literal["data sheet", "measured", "typical"]
"""Where rates are from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The rate of matrix products of one size.

    Attributes:
        rows, inner, columns: of (rows, inner) times (inner, columns).
        alone: FLOPs a second while the other ranks of the host wait.
    """

    rows: Count
    inner: Count
    columns: Count
    alone: Positive
    together: Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """The accelerator of one rank.

    Attributes:
        name: such as ``A100-80GB``.
        family: what efficiencies are calibrated for, such as ``A100``, ``H100``, ``V100``, ``cpu``.
        flops_per_s: peak rate of dense matrix products by dtype: ``float32``, ``bfloat16``, ``float16``.
        memory_bytes: of one accelerator.
        memory_Bps: bandwidth of its memory.
        host_Bps: bandwidth to the host's memory, in one direction; 0 where it has no other memory.
        source: where the rates are from.
        products: by dtype, the rates of matrix products that were measured; empty where none were.
    """

    name: str
    family: str
    flops_per_s: Annotated[Mapping[str, Positive], Field(min_length=1)]
    memory_bytes: Annotated[NumBytes, Field(alias="memory", gt=0, le=MOST_BYTES)]
    memory_Bps: Positive
    host_Bps: NonNegative = 0.0
    source: Source = "data sheet"
    products: Mapping[str, tuple[Rate, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKind:
    """One kind of host.

    Attributes:
        name: such as ``p4d.24xlarge``.
        num_accelerators: ranks on such a node.
        link_Bps: of one accelerator to the others of its node, in one direction.
        link_latency_s: of a message inside of a node.
        network_Bps: of the whole node to other nodes, in one direction.
        memory_bytes: of the host; 0 where it is not known.
        cores: CPU cores that the ranks share where they compute on CPUs; 0 where each has an accelerator.
        price_per_hour: in US dollars; None where none is public.
        price_source: where the price is from, with its date.
        source: where the rates of links are from.
    """

    name: str
    accelerator: Accelerator
    num_accelerators: Annotated[int, Field(alias="accelerators", ge=1, le=_MOST_ACCELERATORS), NUMBER]
    link_Bps: Positive
    link_latency_s: NonNegative = 1e-5
    network_Bps: Positive
    network_latency_s: NonNegative = 2e-5
    memory_bytes: Annotated[NumBytes, Field(alias="memory", ge=0, le=MOST_BYTES)] = 0
    cores: Annotated[int, Field(ge=0, le=MOST_RANKS_OF_HOST), NUMBER] = 0
    price_per_hour: NonNegative | None = None
    price_source: str = ""
    source: Source = "data sheet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Nodes that a job may use; ranks are numbered node by node, kind by kind.

    Attributes:
        nodes: kinds of nodes with how many there are of each, in the order of their ranks.
        between_kinds_Bps: of a node to nodes of another kind, in one direction; None: the slower network.
        measured: when, by what, with which versions; empty where nothing was measured.
        collectives: seconds of collectives over all ranks by the bytes of the whole, as they were measured.
    """

    name: str
    nodes: tuple[tuple[NodeKind, int], ...]
    between_kinds_Bps: float | None = None
    measured: str = ""
    collectives: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        return sum(kind.num_accelerators * number for kind, number in self.nodes)

    @property
    def num_nodes(self) -> int:
        return sum(number for _, number in self.nodes)

    @property
    def price_per_hour(self) -> float | None:
        """Dollars an hour for all nodes; None where the price of some is not known."""
        prices = [(kind.price_per_hour, number) for kind, number in self.nodes]
        if any(price is None for price, _ in prices):
            return None
        return sum(price * number for price, number in prices if price is not None)
