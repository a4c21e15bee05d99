"""The position of a process among all that run the same script."""

from dataclasses import dataclass

from shardwright.errors import LaunchError
from shardwright.limits import MOST_RANKS
from shardwright.printable import control_in, shown

__all__ = ["LaunchEnvironment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnvironment:
    """The position of a process among all that run the same script.

    Attributes:
        local_rank: number among those of this host.
        local_world_size: how many run on this host.
        num_nodes: how many hosts there are.
        master_addr: host of the key-value store at which the ranks meet.
        restart_count: how often the launcher has started the ranks anew.
        launcher_serves_store: the launcher runs that store; otherwise rank 0 has to.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int
    restart_count: int = 0
    launcher_serves_store: bool = False
    source: str

    def __post_init__(self) -> None:
        if max(self.world_size, self.num_nodes) > MOST_RANKS:
            self._refuse(
                f"the world size is {self.world_size}, the number of nodes {self.num_nodes}, and at most "
                f"{MOST_RANKS} go"
            )
        if (control := control_in(self.master_addr)) is not None:
            self._refuse(f"the address of the master is {shown(self.master_addr)}, which has {control} in it")
        for name, value, limit_name, limit in (
            ("rank", self.rank, "world size", self.world_size),
            ("local rank", self.local_rank, "local world size", self.local_world_size),
            ("node rank", self.node_rank, "number of nodes", self.num_nodes),
        ):
            if not 0 <= value < limit:
                self._refuse(
                    f"{name} {value} is not in 0 to {limit - 1}, although the {limit_name} is {limit}"
                )
        if self.local_world_size > self.world_size:
            self._refuse(f"local world size {self.local_world_size} exceeds world size {self.world_size}")
        if self.restart_count < 0:
            self._refuse(f"the number of restarts is {self.restart_count}")
        if not 0 < self.master_port < 2**16:
            self._refuse(f"port {self.master_port} of the master is not in 1 to 65535")

    def _refuse(self, what: str) -> None:
        raise LaunchError(
            f"{self.source}: {what}. Correct these variables, or unset them to run a single process."
        )

    def __str__(self) -> str:
        nodes = f" on node {self.node_rank} of {self.num_nodes}" if self.num_nodes > 1 else ""
        return f"rank {self.rank} of {self.world_size}{nodes} (from {self.source})"
