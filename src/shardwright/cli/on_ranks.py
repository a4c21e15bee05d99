"""Runs a module of ours on several ranks of this host, or of several: for commands that measure."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shardwright.launch.request import LaunchRequest
from shardwright.observe.run_folder import RunFolder

__all__ = ["run_on_ranks"]


def run_on_ranks(
    module: str,
    arguments: Sequence[str],
    *,
    num_ranks: int,
    num_nodes: int = 1,
    node_rank: int | None = None,
    endpoint: str | None = None,
) -> None:
    """Starts the ranks and waits for them; what they say goes to stderr.

    Args:
        module: its name; each rank runs it as a program.
        arguments: that it gets.
        num_ranks: on this host.
        num_nodes: hosts.
        node_rank: number of this host; None lets the hosts number themselves.
        endpoint: where the hosts meet.

    Raises:
        SystemExit: a rank has failed, with the exit code that tells how.
    """
    with tempfile.TemporaryDirectory(prefix="shardwright-") as folder:
        request = LaunchRequest(
            target=module,
            is_module=True,
            arguments=tuple(arguments),
            num_ranks=num_ranks,
            num_nodes=num_nodes,
            node_rank=node_rank,
            endpoint=endpoint,
            run_folder=RunFolder.create(Path(folder), name="ranks", environ={}).path,
        )
        # Here, because it imports torch: --help answers before.
        from shardwright.launch.agent import launch

        code = launch(request, report=lambda text: print(text, file=sys.stderr))
        if code:
            sys.exit(code)
