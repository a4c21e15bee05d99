"""Machines as a file, for `shardwright plan make --machine`.

::

    device:
      name: A100-SXM4-40GB
      memory: 40GiB
      flops_per_s: 312e12
      memory_Bps: 1.5e12
      overhead_s: 2e-5
    ranks_per_node: 8
    intra_node: {latency_s: 5e-6, bandwidth_Bps: 250e9}
    inter_node: {latency_s: 2e-5, bandwidth_Bps: 12.5e9}
"""

import os
from typing import Annotated

from pydantic import Field

from shardwright.cluster.cluster import Cluster, Device, Link
from shardwright.errors import ConfigError
from shardwright.files import Record, UserFile
from shardwright.files.number_fields import NumBytes, Positive
from shardwright.limits import MOST_BYTES, MOST_RANKS_OF_HOST

__all__ = ["read_cluster"]

Seconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class _Device(Record):
    name: str = "device"
    memory: Annotated[NumBytes, Field(ge=0, le=MOST_BYTES)] = 0
    flops_per_s: Positive
    memory_Bps: Positive
    overhead_s: Seconds = 2e-5


class _Link(Record):
    latency_s: Seconds
    bandwidth_Bps: Positive

    def link(self) -> Link:
        return Link(latency_s=self.latency_s, bandwidth_Bps=self.bandwidth_Bps)


class _Machines(Record):
    device: _Device
    ranks_per_node: Annotated[int, Field(ge=1, le=MOST_RANKS_OF_HOST)]
    cores_per_node: Annotated[int, Field(ge=0, le=MOST_RANKS_OF_HOST)] = 0
    intra_node: _Link
    inter_node: _Link | None = None
    host: _Link | None = None


def read_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Reads a machine file, YAML or JSON; the text above is one.

    Without `inter_node`, hosts are as close to one another as the ranks of one host.
    """
    file = UserFile(path, what="machine file", error=ConfigError)
    found = file.model(_Machines, file.read_yaml())
    device, near = found.device, found.intra_node.link()
    return Cluster(
        device=Device(
            name=device.name,
            memory_bytes=device.memory,
            flops_per_s=device.flops_per_s,
            memory_Bps=device.memory_Bps,
            overhead_s=device.overhead_s,
        ),
        ranks_per_node=found.ranks_per_node,
        cores_per_node=found.cores_per_node,
        intra_node=near,
        inter_node=near if found.inter_node is None else found.inter_node.link(),
        host=None if found.host is None else found.host.link(),
    )
