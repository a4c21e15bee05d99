"""Runs one of our modules on several ranks of one or more hosts, for commands that measure."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from shardwright.cli.asking.application import say
from shardwright.errors import UsageError
from shardwright.files import check_place, replace_file
from shardwright.launch.ranks.meeting_place import check_endpoint
from shardwright.launch.ranks.request import LaunchRequest
from shardwright.observe.run_folder import RunFolder

__all__ = ["refuse_unwritable", "run_for_files", "run_on_ranks"]


def run_for_files(
    module: str,
    arguments: Callable[[Sequence[Path]], Sequence[str]],
    *,
    outputs: Sequence[Path],
    num_ranks: int,
    num_nodes: int = 1,
    node_rank: int | None = None,
    endpoint: str | None = None,
) -> bool:
    """Runs a module whose first rank writes files; they are put in place when all has gone well."""
    for output in outputs:
        refuse_unwritable(output)
    with tempfile.TemporaryDirectory(prefix="shardwright-files-") as folder:
        written = [Path(folder, f"{number}{output.suffix}") for number, output in enumerate(outputs)]
        run_on_ranks(
            module,
            arguments(written),
            num_ranks=num_ranks,
            num_nodes=num_nodes,
            node_rank=node_rank,
            endpoint=endpoint,
        )
        found = [(path, output) for path, output in zip(written, outputs, strict=True) if path.exists()]
        for path, output in found:
            _put(output, path.read_bytes())
        return bool(found)


def _put(output: Path, content: bytes) -> None:
    try:
        replace_file(output, content)
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror}.") from error


def refuse_unwritable(output: Path) -> None:
    """Refuses a place where no file can go, before anything is measured for it."""
    try:
        check_place(output)
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror}. Name a file of yours.") from error


def run_on_ranks(
    module: str,
    arguments: Sequence[str],
    *,
    num_ranks: int,
    num_nodes: int = 1,
    node_rank: int | None = None,
    endpoint: str | None = None,
) -> None:
    """Starts the ranks and waits for them; their output goes to stderr."""
    folder = tempfile.mkdtemp(prefix="shardwright-")
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
    if endpoint is not None and num_nodes > 1:
        check_endpoint(endpoint, os.environ, say=say)
    # Here, because it imports torch: --help answers before.
    from shardwright.launch.ranks.agent import launch

    code = launch(request, report=say)
    if code:
        sys.exit(code)  # the logs of the ranks stay where the message says
    shutil.rmtree(folder, ignore_errors=True)
