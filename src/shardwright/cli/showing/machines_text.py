"""Prints machines as text, for people."""

from collections.abc import Iterator

from shardwright.cluster import Accelerator, Inventory, NodeKind
from shardwright.quantities import counted, format_bandwidth, format_bytes, format_flops, format_seconds
from shardwright.text import align

__all__ = ["format_machines"]


def format_machines(machines: Inventory) -> str:
    """Nodes and what they have; products by size and collectives where they were measured."""
    price = machines.price_per_hour
    cost = "" if price is None else f", {price:,.2f} dollars an hour"
    lines = [
        f"{machines.name}: {counted(machines.num_nodes, 'node')}, {counted(machines.num_ranks, 'rank')}{cost}"
    ]
    if machines.measured:
        lines.append(f"measured {machines.measured}")
    for kind, number in machines.nodes:
        lines += ["", *_node(kind, number)]
        if kind.accelerator.products:
            lines += ["", _products(kind.accelerator)]
    if machines.collectives:
        lines += ["", _collectives(machines)]
    return "\n".join(lines)


def _node(kind: NodeKind, number: int) -> Iterator[str]:
    chip = kind.accelerator
    cores = f", {kind.cores} cores" if kind.cores else ""
    yield f"{number} x {kind.name}: {kind.num_accelerators} x {chip.name}{cores} ({kind.source})"
    rates = ", ".join(f"{dtype} {format_flops(rate)}/s" for dtype, rate in chip.flops_per_s.items())
    memory = f"{format_bytes(chip.memory_bytes)} at {format_bandwidth(chip.memory_Bps)}"
    host = f", from the host {format_bandwidth(chip.host_Bps)}" if chip.host_Bps else ""
    yield f"  each: {rates}; {memory}{host} ({chip.source})"
    near = f"{format_bandwidth(kind.link_Bps)} and {format_seconds(kind.link_latency_s)}"
    far = f"{format_bandwidth(kind.network_Bps)} and {format_seconds(kind.network_latency_s)}"
    yield f"  links: in a node {near}, between nodes {far}"
    if kind.price_per_hour is not None:
        yield f"  {kind.price_per_hour:,.2f} dollars an hour ({kind.price_source or 'no source is given'})"


def _products(chip: Accelerator) -> str:
    rows = [["product", "type", "alone", "together"]]
    for dtype, rates in chip.products.items():
        rows += [
            [
                f"{rate.rows} x {rate.inner} x {rate.columns}",
                dtype,
                f"{format_flops(rate.alone)}/s",
                f"{format_flops(rate.together)}/s",
            ]
            for rate in rates
        ]
    return align(rows)


def _collectives(machines: Inventory) -> str:
    sizes = [size for size, _ in next(iter(machines.collectives.values()))]
    rows = [["collective", *map(format_bytes, sizes)]]
    for name, points in machines.collectives.items():
        rows.append([name, *(format_seconds(seconds) for _, seconds in points)])
    return align(rows)
