"""``shardwright probe``: measure what collectives cost here."""

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.run import Endpoint, NodeRank, NumNodes
from shardwright.collectives.choice_table import choice_rows, choices_by_size, crossovers
from shardwright.collectives.prices_file import PRICES_VARIABLE, read_prices
from shardwright.launch.request import LaunchRequest
from shardwright.observe.run_folder import RunFolder
from shardwright.plan import align

__all__ = ["probe"]

Out = Annotated[Path, typer.Argument(metavar="FILE", help="Where the prices go, or are.")]
NumRanks = Annotated[int, typer.Option("--num-ranks", "-n", min=1, help="Ranks on this host.")]
Show = Annotated[bool, typer.Option("--show", help="Measure nothing: show what FILE makes of collectives.")]


def probe(
    out: Out = Path("prices.json"),
    num_ranks: NumRanks = 2,
    num_nodes: NumNodes = 1,
    node_rank: NodeRank = None,
    endpoint: Endpoint = None,
    show: Show = False,
) -> None:
    """Measure what copies, sums and messages between ranks cost, and show which algorithms that makes best.

    Where each rank has a GPU for itself, NCCL's collectives, too.

    Runs that find the file in SHARDWRIGHT_PRICES choose their collectives by it. For example:

    shardwright probe -n 4 prices.json
    """
    if not show:
        with tempfile.TemporaryDirectory(prefix="shardwright-probe-") as folder:
            request = LaunchRequest(
                target="shardwright.comm.probe_ranks",
                is_module=True,
                arguments=(str(out.absolute()),),
                num_ranks=num_ranks,
                num_nodes=num_nodes,
                node_rank=node_rank,
                endpoint=endpoint,
                run_folder=RunFolder.create(Path(folder), name="probe", environ={}).path,
                quiet=True,
            )
            # Here, because it imports torch: --help answers before.
            from shardwright.launch.agent import launch

            code = launch(request, report=lambda text: print(text, file=sys.stderr))
            if code:
                sys.exit(code)
        if node_rank not in (None, 0):
            return  # the host of rank 0 has the file
    prices, topology = read_prices(out)
    for each in (prices, prices.devices):
        if each is None:
            continue
        print(f"{topology}; prices {each.source}")
        choices = choices_by_size(topology, each)
        print(align(choice_rows(choices)))
        print("\n".join(crossovers(choices)))
    if not show:
        print(f"\nexport {PRICES_VARIABLE}={out.absolute()}    # for runs that are to choose by it")
