"""Finds the smallest changes that help where nothing fits."""

from dataclasses import replace

from shardwright.catalogue import LayerChain
from shardwright.cluster import memory_for
from shardwright.costs import Recompute
from shardwright.errors import ConfigError
from shardwright.quantities import format_bytes
from shardwright.topology.pricing import fits
from shardwright.topology.space import all_ways
from shardwright.topology.task import Task
from shardwright.topology.way import Way

__all__ = ["remedies"]

_FACTORS = (2, 4, 8, 16, 32, 64, 128, 256)
_LEAST_SEQUENCE = 128


def remedies(task: Task, closest: Way) -> list[str]:
    """One line for each thing that helps by itself, then the memory that would do."""
    found = _unpinned(task)
    more = next((f for f in _FACTORS if _fits(_with_nodes(task, f))), None)
    if more is not None:
        found.append(
            f"More machines: {more * task.machines.num_nodes} nodes (now {task.machines.num_nodes})."
        )
    if not isinstance(task.model, LayerChain):
        found += _shorter_samples(task)
    needed = max(memory_for(kind, closest.peak_bytes) for kind, _ in task.machines.nodes)
    found.append(f"Larger accelerators: {format_bytes(needed)} each.")
    return found


def _shorter_samples(task: Task) -> list[str]:
    sequence = int(task.shape.sequence)
    for factor in _FACTORS:
        shorter = sequence // factor
        if shorter >= _LEAST_SEQUENCE and _fits(replace(task, sequence=shorter)):
            return [f"Shorter samples: {shorter} tokens (now {sequence})."]
    return []


def _unpinned(task: Task) -> list[str]:
    """The pins whose removal would help."""
    found = []
    for name, value in task.pins.items():
        others = {other: pin for other, pin in task.pins.items() if other != name}
        if _fits(replace(task, pins=others)):
            hint = " (2: full)" if name == "recompute" and value != Recompute.FULL else ""
            found.append(f"Leave {name} to the search (now {value}){hint}.")
    if task.only_what_runs and _fits(replace(task, only_what_runs=False)):
        found.append(
            "Experts shared beside shards, or offload of optimizer state, which this version does not run "
            "yet."
        )
    return found


def _fits(task: Task) -> bool:
    try:
        ways = all_ways(task)
    except ConfigError:
        return False  # for example, a batch that more replicas do not divide
    return bool(fits(task, ways).any())


def _with_nodes(task: Task, factor: int) -> Task:
    nodes = tuple((kind, factor * number) for kind, number in task.machines.nodes)
    return replace(task, machines=replace(task.machines, nodes=nodes))
