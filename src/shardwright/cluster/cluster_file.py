"""Machines by name or as a file, measured by ``shardwright probe`` or written by hand.

::

    cluster_version: 1
    name: two boxes and a rented node
    nodes:
    - kind: p4d.24xlarge            # one that is known by name
      number: 1
    - name: box                     # or one with all that counts
      number: 2
      accelerators: 4
      accelerator:
        name: RTX 4090
        family: RTX4090
        memory: 24GiB
        memory_Bps: 1.0e+12
        flops_per_s: {bfloat16: 1.6e+14, float32: 8.0e+13}
      link_Bps: 2.5e+10             # of an accelerator to others of its node, one direction
      network_Bps: 1.25e+9          # of the node, one direction

A missing field has the default of `NodeKind` or `Accelerator`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, TypeAdapter, ValidationError, field_validator

from shardwright.cluster.cluster import Inventory, NodeKind
from shardwright.cluster.named import kind_called, parse_inventory
from shardwright.errors import ConfigError
from shardwright.files import Record, UserFile, format_yaml, replace_file
from shardwright.files.user_file import NUMBER, Positive
from shardwright.problems import describe, field_names
from shardwright.quantities import MOST_BYTES, MOST_NODES, format_bytes
from shardwright.text import shown

_CLUSTER_VERSION = 1
_MOST_KINDS = 1000
_ADVICE = "shardwright probe measures the present machines; docs/clusters.md has the format"

Size = Annotated[int, Field(ge=0, le=MOST_BYTES)]


def read_inventory(path: str | os.PathLike[str]) -> Inventory:
    """Reads a cluster file; the text above is one."""
    file = UserFile(path, what="cluster file", error=ConfigError, advice=_ADVICE)
    document = file.read_yaml()
    if not isinstance(document, dict):
        raise file.refused("holds no fields")
    version = document.get("cluster_version")
    if version != _CLUSTER_VERSION:
        raise ConfigError(
            f"{file} has cluster_version {shown(version)}, but this version reads {_CLUSTER_VERSION}."
        )
    try:
        return _File.model_validate(document).inventory()
    except ValidationError as error:
        findings = [
            {**finding, "loc": [part for part in finding["loc"] if part not in (_NAMED, _WHOLE)]}
            for finding in error.errors()
        ]
        raise file.wrong_fields(describe(findings, root="the file", known=field_names(_File))) from None


def write_inventory(path: str | os.PathLike[str], machines: Inventory) -> None:
    """Writes a cluster file, whole or not at all; `read_inventory` makes the same of it."""
    replace_file(path, format_yaml(_plain(machines)))


class _Record(Record):
    model_config = ConfigDict(str_max_length=1000)


class _Named(_Record):
    kind: str
    number: Annotated[int, Field(ge=1, le=MOST_NODES)] = 1

    def node_kind(self) -> NodeKind:
        return kind_called(self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole(NodeKind):
    number: Annotated[int, Field(ge=1, le=MOST_NODES), NUMBER] = 1

    def node_kind(self) -> NodeKind:
        return NodeKind(**{each.name: getattr(self, each.name) for each in fields(NodeKind)})


def _form(node: Any) -> str:
    """Nodes are read as what they look like, so that a mistake is told once."""
    return _NAMED if isinstance(node, Mapping) and "kind" in node else _WHOLE


_NAMED, _WHOLE = "by name", "whole"
_AnyNode = Annotated[Annotated[_Named, Tag(_NAMED)] | Annotated[_Whole, Tag(_WHOLE)], Discriminator(_form)]


class _File(_Record):
    cluster_version: Literal[1]
    name: str = ""
    nodes: tuple[_AnyNode, ...]
    between_kinds_Bps: Positive | None = None
    measured: str = ""
    collectives: dict[str, tuple[tuple[Size, Positive], ...]] = Field(default_factory=dict)

    @field_validator("nodes")
    @classmethod
    def _some(cls, nodes: tuple[_AnyNode, ...]) -> tuple[_AnyNode, ...]:
        if not 1 <= len(nodes) <= _MOST_KINDS:
            raise ValueError(f"there must be 1 to {_MOST_KINDS} kinds of nodes")
        return nodes

    def inventory(self) -> Inventory:
        nodes = tuple((node.node_kind(), node.number) for node in self.nodes)
        return Inventory(
            name=self.name or " + ".join(f"{kind.name} x {number}" for kind, number in nodes),
            nodes=nodes,
            between_kinds_Bps=self.between_kinds_Bps,
            measured=self.measured,
            collectives=self.collectives,
        )


def _plain(machines: Inventory) -> dict[str, Any]:
    document: dict[str, Any] = {"cluster_version": _CLUSTER_VERSION, "name": machines.name}
    if machines.measured:
        document["measured"] = machines.measured
    plain = TypeAdapter(NodeKind)
    document["nodes"] = [
        {"name": kind.name, "number": number, **plain.dump_python(kind, by_alias=True, mode="json")}
        for kind, number in machines.nodes
    ]
    if machines.between_kinds_Bps is not None:
        document["between_kinds_Bps"] = machines.between_kinds_Bps
    if machines.collectives:
        document["collectives"] = {
            name: [list(point) for point in points] for name, points in machines.collectives.items()
        }
    return document


_DEVICE_MARGIN = 0.06
"""Of memory, what an allocator cannot use."""

_DEVICE_BASE_BYTES = 2 * 2**30
"""Of memory, what the driver, its kernels, and the buffers of collectives take."""

_FILES = (".yaml", ".yml", ".json")


def find_machines(text: str) -> Inventory:
    """Machines by name, such as ``p4d.24xlarge*4``, or the path of a cluster file.

    Raises:
        ConfigError: there are none of the name, or the file cannot be used.
    """
    return read_inventory(text) if Path(text).suffix in _FILES else parse_inventory(text)


def usable_bytes(kind: NodeKind) -> int:
    """Memory that the tensors of a rank may fill: without what drivers and allocators keep from them.

    Raises:
        ConfigError: nothing is left.
    """
    memory = kind.accelerator.memory_bytes
    if kind.cores:
        return memory
    usable = int(memory / (1 + _DEVICE_MARGIN) - _DEVICE_BASE_BYTES)
    if usable <= 0:
        raise ConfigError(
            f"{kind.accelerator.name} has {format_bytes(memory)}, of which drivers and allocators take "
            f"{_DEVICE_MARGIN:.0%} and {format_bytes(_DEVICE_BASE_BYTES)}: nothing is left for a model. "
            "Check its memory in the cluster file."
        )
    return usable


def memory_for(kind: NodeKind, num_bytes: int) -> int:
    """Memory that accelerators need for tensors of so many bytes: the inverse of `usable_bytes`."""
    return num_bytes if kind.cores else int((num_bytes + _DEVICE_BASE_BYTES) * (1 + _DEVICE_MARGIN))
