"""``shardwright catalogue``: lists models and machines by name; shows machines, writes their file."""

from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.asking.application import AsJson, print_json, show_text
from shardwright.errors import UsageError
from shardwright.quantities import format_bytes, format_parameters
from shardwright.text import align

__all__ = ["catalogue"]

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

    from shardwright.cli.showing.machines_text import format_machines
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
