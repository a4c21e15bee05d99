"""``shardwright trace``: shows the units and operations of a model."""

from typing import Annotated

import typer

from shardwright.cli.asking.application import AsJson, BuildOn, Factory, print_json, show_text
from shardwright.cli.asking.model import check_factory
from shardwright.cli.showing.graph_text import format_graph
from shardwright.observe.console import Console
from shardwright.quantities import MOST_STAGES_OF_RANK

__all__ = ["trace"]

Stages = Annotated[
    int,
    typer.Option(
        "--stages", min=1, max=MOST_STAGES_OF_RANK, help="Stages thought of: with more, units are finer."
    ),
]


def trace(factory: Factory, stages: Stages = 2, build_on: BuildOn = "meta", as_json: AsJson = False) -> None:
    """Show what a model consists of: units, parameters, FLOPs, bytes, ties, what feeds what.

    Nothing is computed and no weights are needed, so a model of any size will do. For example:

    shardwright trace examples/train_gpt.py:build
    """
    check_factory(factory)
    # Here, because they import torch: --help answers before.
    from shardwright.cli.asking.factory import advice_on_meta, build
    from shardwright.torch.units.dry_run import trace_model

    console = Console()
    with console.phase(f"building {factory}"):
        sample = build(factory, device=build_on)
    with console.phase("tracing the model"), advice_on_meta(build_on):
        graph = trace_model(sample.model, *sample.args, loss=sample.loss, num_stages=stages, **sample.kwargs)
    if as_json:
        print_json(graph.to_dict())
    else:
        show_text(format_graph(graph))
