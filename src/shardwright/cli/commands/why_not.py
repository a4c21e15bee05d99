"""``shardwright why-not``: tells why a given way is not the best."""

from typing import Annotated

import typer

from shardwright.cli.asking.application import AsJson, print_json, show_text
from shardwright.cli.asking.topology_task import Asked, on_task

__all__ = ["why_not"]

Wanted = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME=VALUE...", help="What you have in mind: tensor=8 pipeline=4."),
]


@on_task(pins=Wanted)
def why_not(asked: Asked, as_json: AsJson = False) -> None:
    """Say why the best way to train is not the one that you have in mind: how much slower, or larger, it is.

    For example: shardwright why-not gpt-neox-20b "p4d.24xlarge*4" tensor=8 pipeline=4 -b 512
    """
    task = asked.task
    from shardwright.topology.explain import why_not as explain

    found = explain(task, dict(task.pins))
    if as_json:
        ways = {"best": found.best.to_dict(), "wanted": found.wanted.to_dict(), "fits": found.fits}
        print_json(ways | {"sentences": found.sentences})
    else:
        show_text("\n".join(found.sentences))
