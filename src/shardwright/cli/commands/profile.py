"""``shardwright profile``: measures the cost of a model's units on this machine."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.asking.application import (
    NUM_RANKS,
    AsJson,
    Endpoint,
    Factory,
    NodeRank,
    NumNodes,
    print_json,
    say,
    show_text,
)
from shardwright.cli.asking.on_ranks import RANKS, Order, refuse_broken, refuse_unwritable, run_for_files
from shardwright.cli.asking.settings import ConfigFile, Settings, parse_settings, read_settings
from shardwright.cluster import Link
from shardwright.config import Config
from shardwright.planner.profiles import MeasuredProfile
from shardwright.quantities import (
    MOST_RANKS_OF_HOST,
    counted,
    format_bandwidth,
    format_bytes,
    format_flops,
    format_seconds,
)
from shardwright.text import align

NumRanks = Annotated[
    int,
    typer.Option(
        *NUM_RANKS,
        min=1,
        max=MOST_RANKS_OF_HOST,
        help="Ranks on this host, which measure at the same time.",
    ),
]
Output = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where the profile goes.")]
BuildOnRanks = Annotated[
    str,
    typer.Option(
        "--build-on",
        metavar="DEVICE",
        help="Where FACTORY runs on every rank; on meta, ranks take memory for single units alone.",
    ),
]


def profile(
    factory: Factory,
    num_ranks: NumRanks = 2,
    output: Output = Path("profile.json"),
    settings: Settings = None,
    config: ConfigFile = None,
    num_nodes: NumNodes = 1,
    node_rank: NodeRank = None,
    endpoint: Endpoint = None,
    build_on: BuildOnRanks = "cpu",
    as_json: AsJson = False,
) -> None:
    """Measure what each kind of unit of a model costs on this machine, and the links between its ranks.

    Units are timed on all ranks at once, for every size of microbatch that a plan may choose. Plans are made
    from the file for any number of such ranks. For example:

    shardwright profile model.py:build -n 2 -o profile.json

    shardwright plan model.py:build -n 8 --profile profile.json
    """
    resolved = Config.merge(read_settings(config), parse_settings(settings or ()))
    resolved.resolve_world(num_ranks * num_nodes)
    refuse_unwritable(output)
    refuse_broken(factory, build_on=build_on)
    order = Order(factory=factory, build_on=build_on, settings=resolved.model_dump(exclude_defaults=True))
    is_here = run_for_files(
        RANKS,
        lambda paths: [dataclasses.replace(order, out=str(paths[0])).to_json()],
        outputs=[output],
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        node_rank=node_rank,
        endpoint=endpoint,
    )
    if not is_here:
        return  # the host of rank 0 has the file
    found = MeasuredProfile.read(output)
    if as_json:
        print_json({"file": str(output), "profile": found.model_dump(mode="json")})
    else:
        show_text(_text(found))
        say(f"wrote {output}: shardwright plan {factory} -n {num_ranks} --profile {output}")


def _text(profile: MeasuredProfile) -> str:
    rows = [["unit", "forward", "backward", "kept", "rate", "spread"]]
    timed = {key: cost for key, cost in profile.costs.items() if cost.forward_s or cost.backward_s}
    for key, cost in sorted(timed.items(), key=lambda row: -row[1].forward_s - row[1].backward_s):
        rate = f"{format_flops(cost.flops / cost.forward_s)}/s" if cost.flops and cost.forward_s else "-"
        times = [format_seconds(cost.forward_s), format_seconds(cost.backward_s)]
        spread = f"{cost.spread:.0%}" if cost.provenance == "measured" else cost.provenance
        rows.append([key, *times, format_bytes(cost.saved_bytes), rate, spread])
    near, far = profile.cluster.intra_node, profile.cluster.inter_node
    links = f"links: in a host {_link(near)}" + (f", between hosts {_link(far)}" if far != near else "")
    machine = f"{profile.num_ranks} ranks on {profile.cluster.device.name}, {profile.when}"
    parts = [machine, links, "", align(rows)]
    if idle := len(profile.costs) - len(timed):
        parts.append(f"and {counted(idle, 'operation')} that take no time")
    return "\n".join(parts)


def _link(link: Link) -> str:
    return f"{format_bandwidth(link.bandwidth_Bps)} and {format_seconds(link.latency_s)}"
