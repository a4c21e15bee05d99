"""``shardwright plan make --verify``: tries the best plans on the current machines."""

import dataclasses
import tempfile
from pathlib import Path

from shardwright.cli.asking.measuring_order import RANKS, Order, refuse_broken
from shardwright.cli.asking.on_ranks import run_for_files
from shardwright.errors import UsageError
from shardwright.plan import Plan

__all__ = ["verified_plan"]


def verified_plan(
    order: Order,
    *,
    world: int,
    num_nodes: int,
    node_rank: int | None,
    endpoint: str | None,
) -> Plan | None:
    """The plan that was fastest of those that were tried; None on hosts that have not got it.

    Args:
        order: what to try; where it is written is up to this function.
        world: ranks of all hosts.
        num_nodes: hosts.
        node_rank: number of this host.
        endpoint: where the hosts meet.

    Raises:
        UsageError: hosts would have different numbers of ranks; or what the factory raises.
        SystemExit: a rank has failed.
    """
    if world % num_nodes:
        raise UsageError(
            f"--num-ranks {world} on --nnodes {num_nodes} hosts is not a whole number of ranks each. "
            f"Take a multiple of {num_nodes}."
        )
    refuse_broken(order.factory, build_on=order.build_on)
    with tempfile.TemporaryDirectory(prefix="shardwright-plan-") as folder:
        out = Path(folder, "plan.json")
        is_here = run_for_files(
            RANKS,
            lambda paths: [dataclasses.replace(order, out=str(paths[0])).to_json()],
            outputs=[out],
            num_ranks=world // num_nodes,
            num_nodes=num_nodes,
            node_rank=node_rank,
            endpoint=endpoint,
        )
        return Plan.read(out) if is_here else None
