"""``shardwright trace``: shows the units and operations of a model."""

from itertools import zip_longest
from typing import Annotated

import typer

from shardwright.cli.asking.application import AsJson, BuildOn, Factory, print_json, show_text
from shardwright.cli.asking.model import check_factory
from shardwright.model_graph import ModelGraph
from shardwright.observe.console import Console
from shardwright.quantities import MOST_STAGES_OF_RANK, counted, format_bytes, format_flops, format_parameters
from shardwright.text import align, printable, shortened

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


def format_graph(graph: ModelGraph) -> str:
    """A title, a row a unit call, what lies between them, and the ties."""
    ops = [node for node in graph.nodes if node.kind == "op" and not node.free]
    flops, saved = (sum(getattr(node, what) for node in graph.nodes) for what in ("flops", "saved_bytes"))
    lines = [
        f"{counted(len(graph.units), 'unit')}, {format_parameters(graph.num_parameters)} parameters; of a "
        f"microbatch of {graph.batch_size}: {format_flops(flops)} forward, {format_bytes(saved)} kept for "
        "the backward",
        "",
        _units(graph),
        "",
        f"between the units: {counted(len(ops), 'operation')}, {format_flops(sum(n.flops for n in ops))}, "
        f"{format_bytes(sum(node.saved_bytes for node in ops))} kept",
        *_ties(graph),
    ]
    return "\n".join(lines)


def feeds(graph: ModelGraph) -> dict[int, list[int]]:
    """For each unit call, by node: the unit calls that read its result, directly or through operations."""
    readers = graph.consumers()
    # Through operations: what each node's outputs lead to, found from the end, as nodes stand in order.
    reached: dict[int, set[int]] = {}
    for index in range(len(graph.nodes) - 1, -1, -1):
        found: set[int] = set()
        for value in graph.nodes[index].outputs:
            for reader in readers[value]:
                found |= {reader} if graph.nodes[reader].kind == "unit" else reached.get(reader, set())
        reached[index] = found
    return {call: sorted(reached[call]) for call in graph.calls}


def _units(graph: ModelGraph) -> str:
    rows = [["unit", "class", "parameters", "computes", "kept", "makes", "feeds"]]
    targets = feeds(graph)
    for call, following in zip_longest(graph.calls, graph.calls[1:]):
        node = graph.nodes[call]
        unit = graph.units[node.name]
        held = [graph.parameters[name] for name in dict.fromkeys((*unit.parameters, *node.parameters))]
        size = sum(graph.values[value].spec.num_bytes for value in node.outputs)
        rows.append(
            [
                node.label,
                unit.class_name + (", updates buffers" if unit.mutates_buffers else ""),
                format_bytes(sum(parameter.spec.num_bytes for parameter in held)),
                format_flops(node.flops),
                format_bytes(node.saved_bytes),
                format_bytes(size),
                "the next"
                if targets[call] == [following]
                else shortened([graph.nodes[target].label for target in targets[call]]) or "the loss",
            ]
        )
    return align(rows)


def _ties(graph: ModelGraph) -> list[str]:
    """Parameters that several units use, or that have several names."""
    lines = []
    for name, parameter in graph.parameters.items():
        if parameter.is_buffer:
            continue
        users = [unit.name for unit in graph.units.values() if name in unit.parameters]
        users += [node.label for node in graph.nodes if name in node.parameters]
        users = list(dict.fromkeys(users))
        if len(users) > 1 or parameter.aliases:
            size = format_bytes(parameter.spec.num_bytes)
            also = f" = {', '.join(parameter.aliases)}" if parameter.aliases else ""
            lines.append(printable(f"tied: {name}{also} ({size}), used by {shortened(users) or 'no unit'}"))
    return lines
