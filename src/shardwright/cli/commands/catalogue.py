"""``shardwright catalogue``: lists the models and machines known by name."""

from shardwright.cli.asking.application import AsJson, print_json, show_text
from shardwright.quantities import format_bytes, format_parameters
from shardwright.text_table import align

__all__ = ["catalogue"]


def catalogue(as_json: AsJson = False) -> None:
    """List the models and the machines that are known by name."""
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
    machines = [["machines", "accelerators", "memory", "link", "network", "dollars an hour", "price of"]]
    for kind in kinds.values():
        price = "" if kind.price_per_hour is None else f"{kind.price_per_hour:.2f}"
        machines.append(
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
    show_text(f"{align(models)}\n\n{align(machines)}")
