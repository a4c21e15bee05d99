"""``shardwright cheapest``: finds how many machines to use."""

from typing import Annotated

import typer

from shardwright.cli.asking.application import AsJson, print_json, show_text
from shardwright.cli.asking.topology_task import Asked, on_task
from shardwright.errors import UsageError
from shardwright.text_table import align

__all__ = ["cheapest"]

Tokens = Annotated[float, typer.Option("--tokens", help="Of the whole training, such as 300e9.")]
Deadline = Annotated[
    float | None, typer.Option("--days", help="In which training must end; without it, any time.")
]
_DAY_S = 86400.0
_MOST_DAYS = 1e6


@on_task()
def cheapest(
    asked: Asked,
    tokens: Tokens,
    days: Deadline = None,
    as_json: AsJson = False,
) -> None:
    """Find the cheapest number of machines, up to MACHINES, that trains so many tokens in time.

    For example: shardwright cheapest llama3-8b "dgx-h100*64" -b 1024 --tokens 300e9 --days 10
    """
    if days is not None and not 0 < days <= _MOST_DAYS:
        raise UsageError(f"--days is {days:g}, but it must be more than 0, and at most {_MOST_DAYS:g}.")
    task = asked.task
    from shardwright.topology import cheapest as choosing

    deadline_s = None if days is None else days * _DAY_S
    found = choosing.offers(task, tokens=tokens, deadline_s=deadline_s)
    best = choosing.cheapest(found, deadline_s=deadline_s)
    if as_json:
        rows = [
            {
                "nodes": offer.num_nodes,
                "ranks": offer.num_ranks,
                "days": offer.seconds / _DAY_S,
                "dollars": offer.dollars,
                "way": offer.way.to_dict(),
            }
            for offer in found
        ]
        print_json({"nodes": best.num_nodes, "offers": rows})
        return
    table = [["", "nodes", "ranks", "days", "dollars", "way"]]
    for offer in found:
        dollars = "" if offer.dollars is None else f"{offer.dollars:,.0f}"
        mark = "->" if offer is best else ""
        row = [mark, str(offer.num_nodes), str(offer.num_ranks), f"{offer.seconds / _DAY_S:.2f}", dollars]
        table.append([*row, offer.way.title])
    show_text(align(table))
