"""An inventory of machines by kind, the input of a topology search.

A `Cluster` is one run's view of its machines, rank by rank. An `Inventory` comes before: kinds of nodes with
data-sheet or measured rates, and the number of each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Accelerator", "Inventory", "NodeKind", "Rate", "Source"]

Source = Literal["data sheet", "measured", "typical"]
"""Where rates are from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The rate of matrix products of one size.

    Attributes:
        rows, inner, columns: of (rows, inner) times (inner, columns).
        alone: FLOPs a second while the other ranks of the host wait.
        together: while they do the same.
    """

    rows: int
    inner: int
    columns: int
    alone: float
    together: float


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
    flops_per_s: Mapping[str, float]
    memory_bytes: int
    memory_Bps: float
    host_Bps: float = 0.0
    source: Source = "data sheet"
    products: Mapping[str, tuple[Rate, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKind:
    """One kind of host.

    Attributes:
        name: such as ``p4d.24xlarge``.
        accelerator: what each rank has.
        num_accelerators: ranks on such a node.
        link_Bps: of one accelerator to the others of its node, in one direction.
        link_latency_s: of a message inside of a node.
        network_Bps: of the whole node to other nodes, in one direction.
        network_latency_s: of a message between nodes.
        memory_bytes: of the host; 0 where it is not known.
        cores: CPU cores that the ranks share where they compute on CPUs; 0 where each has an accelerator.
        price_per_hour: in US dollars; None where none is public.
        price_source: where the price is from, with its date.
        source: where the rates of links are from.
    """

    name: str
    accelerator: Accelerator
    num_accelerators: int
    link_Bps: float
    link_latency_s: float
    network_Bps: float
    network_latency_s: float
    memory_bytes: int = 0
    cores: int = 0
    price_per_hour: float | None = None
    price_source: str = ""
    source: Source = "data sheet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Nodes that a job may use; ranks are numbered node by node, kind by kind.

    Attributes:
        name: for display.
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
        """Accelerators of all nodes."""
        return sum(kind.num_accelerators * number for kind, number in self.nodes)

    @property
    def num_nodes(self) -> int:
        """Nodes of all kinds."""
        return sum(number for _, number in self.nodes)

    @property
    def price_per_hour(self) -> float | None:
        """Dollars an hour for all nodes; None where the price of some is not known."""
        prices = [(kind.price_per_hour, number) for kind, number in self.nodes]
        if any(price is None for price, _ in prices):
            return None
        return sum(price * number for price, number in prices if price is not None)
