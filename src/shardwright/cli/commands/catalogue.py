"""``shardwright catalogue``: lists models and machines by name; shows machines, writes their file."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwright.cli.asking.application import AsJson, print_json, show_text
from shardwright.errors import UsageError
from shardwright.quantities import (
    counted,
    format_bandwidth,
    format_bytes,
    format_flops,
    format_parameters,
    format_seconds,
)
from shardwright.text import align

if TYPE_CHECKING:
    from shardwright.cluster import Accelerator, Inventory, NodeKind

MachinesToShow = Annotated[
    str | None,
    typer.Argument(metavar="MACHINES", help="Show these: names, such as p4d.24xlarge*4, or a cluster file."),
]
ClusterFile = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write a cluster file, to be edited.")
]


def catalogue(machines: MachinesToShow = None, output: ClusterFile = None, as_json: AsJson = False) -> None:
    """List the models and the machines that are known by name; of MACHINES, show all that is known.

    For example: shardwright catalogue "p4d.24xlarge*4 + p5.48xlarge" -o mine.yaml
    """
    if machines is not None:
        _show_machines(machines, output, as_json=as_json)
        return
    if output is not None:
        raise UsageError(f"--output is {output}, but no machines are named. Name them: p4d.24xlarge*4")
    # Here, because they import numpy: --help answers before.
    from dataclasses import asdict

    from shardwright.catalogue import ARCHITECTURES
    from shardwright.cluster import node_kinds

    kinds = node_kinds()
    if as_json:
        print_json(
            {
                "models": {name: asdict(model) for name, model in ARCHITECTURES.items()},
                "machines": {name: asdict(kind) for name, kind in kinds.items()},
            }
        )
        return
    models = [["model", "parameters", "layers", "hidden", "tokens", "from"]]
    for model in ARCHITECTURES.values():
        active = f", {model.active_parameters / 1e9:.1f} active" if model.experts > 1 else ""
        size = f"{format_parameters(model.num_parameters)}{active}"
        layers = str(model.layers + model.encoder_layers)
        models.append([model.name, size, layers, str(model.hidden), str(model.sequence), model.source])
    nodes = [["machines", "accelerators", "memory", "link", "network", "dollars an hour", "price of"]]
    for kind in kinds.values():
        price = "" if kind.price_per_hour is None else f"{kind.price_per_hour:.2f}"
        nodes.append(
            [
                kind.name,
                f"{kind.num_accelerators} x {kind.accelerator.name}",
                format_bytes(kind.accelerator.memory_bytes),
                f"{kind.link_Bps / 1e9:.0f} GB/s",
                f"{kind.network_Bps / 1e9:.4g} GB/s",
                price,
                kind.price_source,
            ]
        )
    show_text(f"{align(models)}\n\n{align(nodes)}")


def _show_machines(text: str, output: Path | None, *, as_json: bool) -> None:
    """What machines have: rates, memory, links, prices; of a probed cluster, all that was measured."""
    from dataclasses import asdict

    from shardwright.cluster import find_machines
    from shardwright.cluster.cluster_file import write_inventory

    found = find_machines(text)
    if output is not None:
        try:
            write_inventory(output, found)
        except OSError as error:
            raise UsageError(f"--output {output} cannot be written: {error.strerror}.") from error
    if as_json:
        print_json(asdict(found) | {"nodes": [{"kind": asdict(k), "number": n} for k, n in found.nodes]})
    else:
        show_text(format_machines(found))


def format_machines(machines: "Inventory") -> str:
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


def _node(kind: "NodeKind", number: int) -> Iterator[str]:
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


def _products(chip: "Accelerator") -> str:
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


def _collectives(machines: "Inventory") -> str:
    sizes = [size for size, _ in next(iter(machines.collectives.values()))]
    rows = [["collective", *map(format_bytes, sizes)]]
    for name, points in machines.collectives.items():
        rows.append([name, *(format_seconds(seconds) for _, seconds in points)])
    return align(rows)
