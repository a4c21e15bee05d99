"""Machines as a file: what `shardwright plan make --machine` reads.

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
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    field_validator,
)

from shardwright.cluster.cluster import Cluster, Device, Link
from shardwright.errors import ConfigError
from shardwright.problems import describe, join
from shardwright.units import parse_bytes

__all__ = ["read_cluster"]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Device(_Record):
    name: str = "device"
    memory: int = 0
    flops_per_s: Positive
    memory_Bps: Positive
    overhead_s: NonNegativeFloat = 2e-5

    @field_validator("memory", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        try:
            return parse_bytes(value)
        except ConfigError:
            raise ValueError("it must be a size such as 40GiB, or a number of bytes") from None


class _Link(_Record):
    latency_s: NonNegativeFloat
    bandwidth_Bps: Positive

    def link(self) -> Link:
        return Link(latency_s=self.latency_s, bandwidth_Bps=self.bandwidth_Bps)


class _Machines(_Record):
    device: _Device
    ranks_per_node: PositiveInt
    cores_per_node: NonNegativeInt = 0
    intra_node: _Link
    inter_node: _Link | None = None


def read_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Reads a machine file, YAML or JSON; the text above is one.

    Without `inter_node`, hosts are as close to one another as the ranks of one host.

    Raises:
        ConfigError: it cannot be read, or a field is missing, unknown or out of range; all are named.
    """
    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"machine file {path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"machine file {path} is neither YAML nor JSON: {error}") from error
    try:
        found = _Machines.model_validate(document)
    except ValidationError as error:
        problems = describe(error.errors(), root="the file")
        raise ConfigError(join(f"machine file {path} cannot be used:", problems)) from error
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
    )
