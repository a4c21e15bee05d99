"""Prints machines as text, for people."""

from collections.abc import Iterator

from shardwright.cluster import Accelerator, Inventory, NodeKind
from shardwright.quantities import format_bytes, format_count, format_seconds
from shardwright.text_table import align

__all__ = ["format_machines"]


def format_machines(machines: Inventory) -> str:
    """Nodes and what they have; products by size and collectives where they were measured."""
    price = machines.price_per_hour
    cost = "" if price is None else f", {price:,.2f} dollars an hour"
    lines = [f"{machines.name}: {machines.num_nodes} nodes, {machines.num_ranks} ranks{cost}"]
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
    rates = ", ".join(f"{dtype} {format_count(rate)}FLOP/s" for dtype, rate in chip.flops_per_s.items())
    memory = f"{format_bytes(chip.memory_bytes)} at {_rate(chip.memory_Bps)}"
    host = f", from the host {_rate(chip.host_Bps)}" if chip.host_Bps else ""
    yield f"  each: {rates}; {memory}{host} ({chip.source})"
    near = f"{_rate(kind.link_Bps)} and {format_seconds(kind.link_latency_s)}"
    far = f"{_rate(kind.network_Bps)} and {format_seconds(kind.network_latency_s)}"
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
                f"{format_count(rate.alone)}FLOP/s",
                f"{format_count(rate.together)}FLOP/s",
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


def _rate(bytes_per_s: float) -> str:
    return f"{format_count(bytes_per_s)}B/s"
