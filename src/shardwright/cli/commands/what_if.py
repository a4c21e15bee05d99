"""``shardwright what-if``: prices other machines, faster links and longer samples."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from shardwright.cli.asking.application import AsJson, print_json, show_text
from shardwright.cli.asking.topology_task import Asked, on_task
from shardwright.errors import UsageError
from shardwright.quantities import format_bytes, format_seconds
from shardwright.text_table import align

if TYPE_CHECKING:
    from shardwright.topology import Task

__all__ = ["what_if"]

_MOST = 1000.0


@on_task()
def what_if(
    asked: Asked,
    other_machines: Annotated[str | None, typer.Option("--other-machines", help="Others instead.")] = None,
    other_batch: Annotated[
        int | None, typer.Option("--other-batch", help="Samples of a step instead.")
    ] = None,
    other_sequence: Annotated[int | None, typer.Option("--other-sequence", help="Tokens instead.")] = None,
    network: Annotated[float, typer.Option("--network", help="Networks this many times as fast.")] = 1.0,
    links: Annotated[
        float, typer.Option("--links", help="Links inside of nodes so many times as fast.")
    ] = 1.0,
    memory: Annotated[
        float, typer.Option("--memory", help="Accelerators with so many times the memory.")
    ] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Show what other machines, faster links, more memory, or longer samples would change.

    For example: shardwright what-if gpt-neox-20b "p4d.24xlarge*4" --batch 512 --network 4
    """
    task = asked.task
    other = _changed(
        task, other_machines, other_batch, other_sequence, network=network, links=links, memory=memory
    )
    if other == task:
        raise UsageError(
            "nothing is changed. Say what: --other-machines, --other-batch, --other-sequence, --network, "
            "--links or --memory."
        )
    from shardwright.topology import search

    now, then = (search(each).best for each in (task, other))
    ratio = then.tokens_per_s / now.tokens_per_s
    if as_json:
        print_json({"now": now.to_dict(), "then": then.to_dict(), "times_the_tokens_per_s": ratio})
        return
    rows = [["", "step", f"{task.unit}/s", "memory", "way"]]
    for name, best in (("now", now), ("then", then)):
        rate = f"{best.tokens_per_s:,.0f}"
        rows.append([name, format_seconds(best.step_s), rate, format_bytes(best.peak_bytes), best.title])
    show_text(f"{align(rows)}\n\n{ratio:.2f} times as many {task.unit} a second.")


def _changed(
    task: "Task",
    machines: str | None,
    batch: int | None,
    sequence: int | None,
    *,
    network: float,
    links: float,
    memory: float,
) -> "Task":
    from shardwright.cluster import find_machines

    for name, factor in (("--network", network), ("--links", links), ("--memory", memory)):
        if not 1 / _MOST <= factor <= _MOST:
            raise UsageError(f"{name} is {factor:g}, but it must be from {1 / _MOST:g} to {_MOST:g}.")
    found = task.machines if machines is None else find_machines(machines)
    nodes = tuple(
        (
            replace(
                kind,
                network_Bps=kind.network_Bps * network,
                link_Bps=kind.link_Bps * links,
                accelerator=replace(
                    kind.accelerator, memory_bytes=int(kind.accelerator.memory_bytes * memory)
                ),
            ),
            number,
        )
        for kind, number in found.nodes
    )
    between = found.between_kinds_Bps
    return replace(
        task,
        machines=replace(
            found, nodes=nodes, between_kinds_Bps=None if between is None else between * network
        ),
        batch=task.batch if batch is None else batch,
        sequence=task.sequence if sequence is None else sequence,
    )
