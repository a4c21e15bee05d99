"""``shardwright probe``: measures the current machines."""

from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.asking.application import (
    NUM_RANKS,
    AsJson,
    Endpoint,
    NodeRank,
    NumNodes,
    print_json,
    show_text,
)
from shardwright.cli.asking.on_ranks import run_for_files
from shardwright.cli.commands.catalogue import format_machines
from shardwright.cluster.cluster_file import read_inventory
from shardwright.collectives.choose_on_devices import choices_by_size, crossovers
from shardwright.collectives.prices import PRICES_VARIABLE, read_prices
from shardwright.errors import ConfigError
from shardwright.files import UserFile
from shardwright.quantities import MOST_RANKS_OF_HOST

Out = Annotated[Path, typer.Argument(metavar="FILE", help="Where the prices go.")]
NumRanks = Annotated[int, typer.Option(*NUM_RANKS, min=1, max=MOST_RANKS_OF_HOST, help="Ranks on this host.")]
ClusterOption = Annotated[
    Path, typer.Option("--cluster", metavar="FILE", help="Where the machines go, as YAML.")
]


def probe(
    out: Out = Path("prices.json"),
    num_ranks: NumRanks = 2,
    num_nodes: NumNodes = 1,
    node_rank: NodeRank = None,
    endpoint: Endpoint = None,
    cluster: ClusterOption = Path("cluster.yaml"),
    as_json: AsJson = False,
) -> None:
    """Measure the present machines: devices, memory, links, collectives; and show what follows.

    Products of matrices by size and type, alone and with all ranks busy, memory, links and collectives go
    into a cluster file, which plan --cluster and search take. What collectives are made of goes into
    FILE: runs that find it in SHARDWRIGHT_PRICES choose their algorithms by it. For example:

    shardwright probe -n 4 prices.json
    """
    is_here = run_for_files(
        "shardwright.torch.rank_probe",
        lambda paths: [str(path) for path in paths],
        outputs=[out, cluster],
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        node_rank=node_rank,
        endpoint=endpoint,
    )
    if not is_here:
        return  # the host of rank 0 has the files
    alone = num_ranks * num_nodes == 1
    if as_json:
        print_json(
            {
                "cluster": UserFile(cluster, what="", error=ConfigError).read_yaml(),
                "prices": None if alone else UserFile(out, what="", error=ConfigError).read_json(),
            }
        )
        return
    show_text(format_machines(read_inventory(cluster)))
    show_text()
    if not alone:
        show_text(choices_text(out))
    show_text(f"\nwrote {cluster}: for plan --cluster {cluster}, and search MODEL {cluster}")
    if not alone:
        show_text(f"for runs that are to choose by it:\nexport {PRICES_VARIABLE}={out.absolute()}")


def choices_text(path: Path) -> str:
    """The algorithms of collectives, by size."""
    prices, topology = read_prices(path)
    lines = []
    for each in (prices, prices.devices):
        if each is not None:
            lines += [f"{topology}; prices {each.source}", *crossovers(choices_by_size(topology, each))]
    return "\n".join(lines)
