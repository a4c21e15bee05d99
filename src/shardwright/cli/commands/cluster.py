"""``shardwright cluster``: shows machines, or writes them to a file."""

from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.asking.application import AsJson, print_json, show_text
from shardwright.errors import UsageError

__all__ = ["cluster"]

Machines = Annotated[
    str, typer.Argument(metavar="MACHINES", help="Names, such as p4d.24xlarge*4, or a cluster file.")
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write a cluster file, to be edited.")
]


def cluster(machines: Machines, output: Output = None, as_json: AsJson = False) -> None:
    """Show what machines have: rates, memory, links, prices; of a probed cluster, all that was measured.

    For example: shardwright cluster "p4d.24xlarge*4 + p5.48xlarge" -o mine.yaml
    """
    # Here, because they import pydantic: --help answers before.
    from dataclasses import asdict

    from shardwright.cli.showing.machines_text import format_machines
    from shardwright.cluster import find_machines
    from shardwright.cluster.cluster_file import write_inventory

    found = find_machines(machines)
    if output is not None:
        try:
            write_inventory(output, found)
        except OSError as error:
            raise UsageError(f"--output {output} cannot be written: {error.strerror}.") from error
    if as_json:
        print_json(asdict(found) | {"nodes": [{"kind": asdict(k), "number": n} for k, n in found.nodes]})
    else:
        show_text(format_machines(found))
