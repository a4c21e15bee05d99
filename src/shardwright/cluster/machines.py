"""Machines on a command line, by name or as a file; and what fits in their memory."""

from pathlib import Path

from shardwright.cluster.cluster import Inventory, NodeKind
from shardwright.cluster.cluster_file import read_inventory
from shardwright.cluster.named import parse_inventory
from shardwright.errors import ConfigError
from shardwright.quantities import format_bytes

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
