"""``shardwright run``: run a script on several ranks."""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from shardwright.config import Config
from shardwright.errors import ConfigError, UsageError
from shardwright.launch.request import LaunchRequest
from shardwright.launch.torchrun import torchrun_command, torchrun_line
from shardwright.observe.run_folder import RunFolder, show_path
from shardwright.plan import Plan

__all__ = ["run"]

Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python script; with -m, a module.")]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="What the script gets.")]
IsModule = Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is the name of a module.")]
NumRanks = Annotated[
    int | None, typer.Option("--num-ranks", "-n", min=1, help="Ranks on this host; default: its GPUs, or 1.")
]
NumNodes = Annotated[int, typer.Option("--nnodes", min=1, help="Hosts.")]
NodeRank = Annotated[int | None, typer.Option("--node-rank", min=0, help="Number of this host, from 0.")]
Endpoint = Annotated[
    str | None, typer.Option("--rdzv-endpoint", metavar="HOST:PORT", help="Where the hosts meet.")
]
MaxRestarts = Annotated[
    int, typer.Option("--max-restarts", min=0, help="How often all ranks start again after a failure.")
]
PlanFile = Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="Plan to follow.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Settings, YAML or JSON.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One setting, stronger than the file; may be repeated."),
]
RunDir = Annotated[Path, typer.Option("--run-dir", metavar="DIR", help="Folder that holds the run folders.")]
Name = Annotated[str | None, typer.Option("--name", help="Name of the run folder; default: the time.")]
Grace = Annotated[
    float, typer.Option("--grace", min=0.0, metavar="SECONDS", help="Time to save after Ctrl-C or SIGTERM.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the torchrun line that does the same, and stop.")
]
AsJson = Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing unless something fails.")]
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
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run a script on several ranks of this host, or of several hosts.

    Options of shardwright come before the script; what follows the script belongs to it. For example:

    shardwright run -n 2 --set microbatches=4 train.py --epochs 3
    """
    if num_nodes > 1 and name is None:
        raise UsageError(f"--nnodes {num_nodes} needs --name, so that all hosts write into one run folder.")
    request = LaunchRequest(
        target=script,
        is_module=is_module,
        arguments=tuple(arguments or ()),
        num_ranks=num_ranks or _num_devices(),
        num_nodes=num_nodes,
        node_rank=node_rank,
        endpoint=endpoint,
        max_restarts=max_restarts,
        run_folder=run_dir / (name or f"{datetime.now():%Y-%m-%d_%H-%M-%S}"),
        plan=plan,
        config=config,
        settings=_parse_settings(settings or ()),
        grace_s=grace_s,
    )
    _check_settings(request)
    if dry_run:
        print(_as_json(request) if as_json else torchrun_line(request, os.environ))
        return
    folder = RunFolder.create(run_dir, name=name, environ={})
    _launch(dataclasses.replace(request, run_folder=folder.path), quiet=quiet, verbose=verbose)


def _launch(request: LaunchRequest, *, quiet: bool, verbose: bool) -> None:
    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if not quiet:
        ranks = "1 rank" if request.num_ranks == 1 else f"{request.num_ranks} ranks"
        where = f" on each of {request.num_nodes} hosts" if request.num_nodes > 1 else ""
        say(f"shardwright run: {ranks}{where}, run folder {show_path(request.run_folder)}")
    # Here, because it imports torch: the checks above answer before.
    from shardwright.launch.agent import launch

    sys.exit(launch(request, report=say, verbose=verbose))


def _num_devices() -> int:
    try:
        import torch
    except ImportError:
        return 1
    return torch.cuda.device_count() or 1


def _parse_settings(words: Sequence[str]) -> dict[str, Any]:
    """Reads ``key=value`` words; a value is JSON where it can be read so, else text."""
    settings: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {word}: write it as KEY=VALUE, for example --set microbatches=4")
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    return settings


def _check_settings(request: LaunchRequest) -> None:
    """Finds here what otherwise each rank would complain about."""
    from_file: Any = {}
    if request.config is not None:
        try:
            from_file = yaml.safe_load(request.config.read_text()) or {}
        except yaml.YAMLError as error:
            raise ConfigError(f"--config {request.config} is neither YAML nor JSON: {error}") from error
        if not isinstance(from_file, dict):
            raise ConfigError(
                f"--config {request.config} holds no settings. Write lines such as microbatches: 4"
            )
    Config.merge(from_file, request.settings)
    if request.plan is not None:
        Plan.read(request.plan)


def _as_json(request: LaunchRequest) -> str:
    content = {
        "command": torchrun_command(request),
        "environment": request.worker_environ(os.environ),
        "run_folder": str(request.run_folder),
    }
    return json.dumps(content, indent=2)
