"""What measuring ranks are ordered to do; `measuring_ranks`, which imports torch, does it."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwright.cli.asking.application import say
from shardwright.cli.asking.model import check_factory
from shardwright.errors import UsageError
from shardwright.files import check_place, replace_file
from shardwright.launch.launching import launch
from shardwright.launch.ranks.meeting_place import check_endpoint
from shardwright.launch.ranks.request import LaunchRequest
from shardwright.observe.run_folder import RunFolder

RANKS = "shardwright.cli.asking.measuring_ranks"
"""The module that each rank runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order to measure."""

    factory: str
    build_on: str
    settings: Mapping[str, Any]
    out: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Order":
        return cls(**json.loads(text))


def refuse_broken(factory: str, *, build_on: str) -> None:
    """Runs a factory once, so that not every rank reports its error."""
    check_factory(factory)
    # Here, because it imports torch: --help answers before.
    from shardwright.cli.asking.factory import build

    build(factory, device=build_on)


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
        ranks = Path(tempfile.mkdtemp(prefix="shardwright-"))
        request = LaunchRequest(
            target=module,
            is_module=True,
            arguments=tuple(arguments(written)),
            num_ranks=num_ranks,
            num_nodes=num_nodes,
            node_rank=node_rank,
            endpoint=endpoint,
            run_folder=RunFolder.create(ranks, name="ranks", environ={}).path,
        )
        if endpoint is not None and num_nodes > 1:
            check_endpoint(endpoint, os.environ, say=say)
        if code := launch(request, report=say):
            sys.exit(code)  # the logs of the ranks stay where the message says
        shutil.rmtree(ranks, ignore_errors=True)
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
