"""``shardwright run``: runs a script on several ranks."""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwright.cli.asking.application import say, show_text
from shardwright.cli.asking.settings import ConfigFile, Settings, parse_settings, read_settings
from shardwright.comm.trust.run_secret import SECRET, has_secret
from shardwright.config import Config
from shardwright.errors import UsageError
from shardwright.launch.ranks.request import LaunchRequest
from shardwright.launch.ranks.smp_parameters import check_smp_parameters, read_smp_parameters
from shardwright.launch.ranks.torchrun import torchrun_command, torchrun_line
from shardwright.limits import MOST_NODES, MOST_RANKS_OF_HOST, MOST_RESTARTS, MOST_SECONDS
from shardwright.observe.run_folder import RunFolder, check_name, show_path
from shardwright.plan import Plan

__all__ = ["run"]


class Device(StrEnum):
    """Where ranks compute."""

    AUTO = "auto"
    CPU = "cpu"


Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python script; with -m, a module.")]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="What the script gets.")]
IsModule = Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is the name of a module.")]
# The last two as torchrun has them.
_NUM_RANKS = ("--num-ranks", "-n", "--nproc-per-node", "--nproc_per_node")
NumRanks = Annotated[
    int | None,
    typer.Option(
        *_NUM_RANKS, min=1, max=MOST_RANKS_OF_HOST, help="Ranks on this host; default: its GPUs, or 1."
    ),
]
NumNodes = Annotated[int, typer.Option("--nnodes", min=1, max=MOST_NODES, help="Hosts.")]
NodeRank = Annotated[
    int | None, typer.Option("--node-rank", min=0, max=MOST_NODES, help="Number of this host, from 0.")
]
Endpoint = Annotated[
    str | None, typer.Option("--rdzv-endpoint", metavar="HOST:PORT", help="Where the hosts meet.")
]
MaxRestarts = Annotated[
    int,
    typer.Option(
        "--max-restarts", min=0, max=MOST_RESTARTS, help="How often all ranks start again after a failure."
    ),
]
PlanFile = Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="Plan to follow.")]
RunDir = Annotated[Path, typer.Option("--run-dir", metavar="DIR", help="Folder that holds the run folders.")]
Name = Annotated[str | None, typer.Option("--name", help="Name of the run folder; default: the time.")]
Grace = Annotated[
    float,
    typer.Option(
        "--grace", min=0.0, max=MOST_SECONDS, metavar="SECONDS", help="Time to save after Ctrl-C or SIGTERM."
    ),
]
AllowOlder = Annotated[
    bool, typer.Option("--allow-older", help="Resume from an older checkpoint if the newest is damaged.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the torchrun line that does the same, and stop.")
]
AsJson = Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON.")]
OnDevice = Annotated[
    Device,
    typer.Option(
        "--device",
        metavar="auto|cpu",
        help="cpu: a script written for CUDA runs on the CPU (docs/launch.md, CPU mode).",
    ),
]
MpParameters = Annotated[
    str | None,
    typer.Option(
        "--mp-parameters",
        "--mp_parameters",
        metavar="K=V,... | JSON | FILE.json",
        help="Parameters of SageMaker's model parallel library, for scripts that use its names.",
    ),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="No progress of Shardwright; its warnings and errors stay.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show what torchelastic does.")]


def run(
    script: Script,
    arguments: Arguments = None,
    is_module: IsModule = False,
    num_ranks: NumRanks = None,
    num_nodes: NumNodes = 1,
    node_rank: NodeRank = None,
    endpoint: Endpoint = None,
    max_restarts: MaxRestarts = 0,
    plan: PlanFile = None,
    config: ConfigFile = None,
    settings: Settings = None,
    run_dir: RunDir = Path("runs"),
    name: Name = None,
    grace_s: Grace = 30.0,
    device: OnDevice = Device.AUTO,
    mp_parameters: MpParameters = None,
    allow_older: AllowOlder = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run a script on several ranks of this host, or of several hosts.

    Options of shardwright come before the script; what follows the script belongs to it. For example:

    shardwright run -n 2 --set microbatches=4 train.py --epochs 3
    """
    if as_json and not dry_run:
        raise UsageError(
            "--json is for --dry-run: what a script prints is its own. Add --dry-run, or drop it."
        )
    if num_nodes > 1 and name is None:
        raise UsageError(f"--nnodes {num_nodes} needs --name, so that all hosts write into one run folder.")
    if name is not None:
        check_name(name)
    request = LaunchRequest(
        target=script,
        is_module=is_module,
        arguments=tuple(arguments or ()),
        num_ranks=num_ranks or 1,
        num_nodes=num_nodes,
        node_rank=node_rank,
        endpoint=endpoint,
        max_restarts=max_restarts,
        run_folder=run_dir / (name or f"{datetime.now():%Y-%m-%d_%H-%M-%S}"),
        plan=plan,
        config=config,
        settings={**parse_settings(settings or ()), **({"allow_older": True} if allow_older else {})},
        grace_s=grace_s,
        quiet=quiet,
        device=device.value,
        mp_parameters=None if mp_parameters is None else _read_mp_parameters(mp_parameters),
    )
    _check_settings(request)
    # Last, because it imports torch: mistakes are told before.
    if num_ranks is None and device is not Device.CPU:
        request = dataclasses.replace(request, num_ranks=_num_devices())
    if not quiet:
        _note_misplaced(script, arguments or (), num_ranks=num_ranks)
    if dry_run:
        show_text(_as_json(request) if as_json else torchrun_line(request, os.environ))
        return
    folder = RunFolder.create(run_dir, name=name, environ={})
    if num_nodes == 1:  # the launchers of several hosts share one
        folder.hold("logs")
    _launch(dataclasses.replace(request, run_folder=folder.path), quiet=quiet, verbose=verbose)


def _launch(request: LaunchRequest, *, quiet: bool, verbose: bool) -> None:
    if not quiet:
        ranks = "1 rank" if request.num_ranks == 1 else f"{request.num_ranks} ranks"
        where = f" on each of {request.num_nodes} hosts" if request.num_nodes > 1 else ""
        say(f"shardwright run: {ranks}{where}, run folder {show_path(request.run_folder)}")
    # Here, because it imports torch: the checks above answer before.
    from shardwright.launch.ranks.agent import launch

    sys.exit(launch(request, report=say, verbose=verbose))


def _note_misplaced(script: str, arguments: Sequence[str], *, num_ranks: int | None) -> None:
    """Says so where the number of ranks stands behind the script, which then gets it.

    The script may have such an option of its own, so this is no error.
    """
    words = [word.partition("=")[0] for word in arguments]
    found = next((word for word in words if word in _NUM_RANKS), None)
    if found is not None and num_ranks is None:
        say(
            f"note: {found} stands after {script}, so {script} gets it. For shardwright, put it before: "
            f"shardwright run {found} 2 {script}"
        )


def _read_mp_parameters(text: str) -> dict[str, Any]:
    parameters = read_smp_parameters(text)
    for remark in check_smp_parameters(parameters):
        say(f"note: {remark}")
    return parameters


def _num_devices() -> int:
    try:
        import torch
    except ImportError:
        return 1
    return torch.cuda.device_count() or 1


def _check_settings(request: LaunchRequest) -> None:
    """Finds here what otherwise each rank would complain about."""
    Config.merge(read_settings(request.config), request.settings)
    if request.plan is not None:
        Plan.read(request.plan)


def _said_of_secret(request: LaunchRequest) -> dict[str, str]:
    if has_secret(os.environ):
        return {}  # ranks find it there, and it is not for the console
    return {SECRET: "(made at the start)"} if request.num_nodes == 1 else {}


def _as_json(request: LaunchRequest) -> str:
    content = {
        "command": torchrun_command(request),
        "environment": request.worker_environ(os.environ) | _said_of_secret(request),
        "run_folder": str(request.run_folder),
    }
    return json.dumps(content, indent=2)
