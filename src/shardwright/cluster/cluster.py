"""A cluster: devices, their memory and peak rates, and the links between them."""

from dataclasses import dataclass

__all__ = ["Cluster", "Device", "HostCosts", "Link"]


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device of one rank.

    Attributes:
        name: for display.
        family: of accelerators, for which finer shares of the rates are calibrated; empty: unknown.
        memory_bytes: memory that one rank may use; 0 means unknown (no limit is checked).
        flops_per_s: peak rate of a large matrix product in the model's dtype.
        reached: share of it that products reach; 1 where it was measured, and is no peak of a data sheet.
        memory_Bps: bytes of its memory that kernels read and write a second.
        overhead_s: time that one unit call takes however small it is.
        update_Bps: bytes of parameters that the optimizer updates a second; 0 where it was not measured.
    """

    name: str
    family: str = ""
    memory_bytes: int = 0
    flops_per_s: float = 5e10
    reached: float = 0.7
    memory_Bps: float = 1e10
    overhead_s: float = 2e-5
    update_Bps: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection between two ranks: a message of n bytes takes ``latency_s + n / bandwidth_Bps``.

    Attributes:
        latency_s: seconds that a message of no bytes takes.
        bandwidth_Bps: bytes per second of a large one.
        occupancy: share of that time for which each end cannot compute, because its core copies the message:
            near 1 for ranks of one host that talk over sockets, 0 where the network card does the work.
    """

    latency_s: float
    bandwidth_Bps: float
    occupancy: float = 0.0

    def seconds(self, num_bytes: float) -> float:
        """Time of one message of `num_bytes`."""
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

    step_s: float
    action_s: float
    unit_s: float = 0.0
    operation_s: float = 0.0

    def script_s(self, *, units: int, operations: int) -> float:
        """What the step function takes for a microbatch beside computing."""
        return units * self.unit_s + operations * self.operation_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machines that run a job.

    Attributes:
        device: what each rank has.
        ranks_per_node: ranks that share a host.
        cores_per_node: CPU cores that the ranks of one host share when the devices are CPUs; 0 when every
            rank has a device of its own (GPUs). With more active ranks than cores, each runs slower in
            proportion.
        intra_node: link between two ranks of one host.
        inter_node: link between two hosts.
        host: from each rank to where it offloads what units keep, all ranks of a host at once: pinned memory,
            or a disk; occupancy is that of a rank without a core to spare. None: not known.
        host_costs: of the library where ranks share a model; None: the usual ones.
        loop_costs: the same where each rank has all of it; None: the usual ones.
        slowness: for each host, how many times as long its ranks compute as costs say; empty: as long. Costs
            that all ranks have measured together are means; those of `cluster_of` are of the slowest host.
    """

    device: Device
    ranks_per_node: int
    cores_per_node: int = 0
    intra_node: Link
    inter_node: Link
    host: Link | None = None
    host_costs: HostCosts | None = None
    loop_costs: HostCosts | None = None
    slowness: tuple[float, ...] = ()

    def link(self, rank_a: int, rank_b: int) -> Link:
        """The link between two world ranks, which are numbered host by host."""
        same_host = rank_a // self.ranks_per_node == rank_b // self.ranks_per_node
        return self.intra_node if same_host else self.inter_node

    def slowness_of(self, rank: int) -> float:
        """The factor on the seconds of a world rank's computing; 1 for unknown hosts."""
        host = rank // self.ranks_per_node
        return self.slowness[host] if host < len(self.slowness) else 1.0
