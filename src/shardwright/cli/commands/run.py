"""``shardwright run``: runs a script on several ranks."""

import atexit
import dataclasses
import gc
import json
import os
import shlex
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwright.cli.asking.application import Endpoint, NodeRank, NumNodes, say, show_text
from shardwright.cli.asking.settings import ConfigFile, Settings, parse_settings, read_settings
from shardwright.comm.joining.run_secret import SECRET, has_secret
from shardwright.config import Config
from shardwright.errors import UsageError
from shardwright.exit_codes import FAILED
from shardwright.launch.launching import launch
from shardwright.launch.ranks.meeting_place import check_endpoint
from shardwright.launch.ranks.request import LaunchRequest, torchrun_command, torchrun_line
from shardwright.launch.ranks.smp_parameters import check_smp_parameters, read_smp_parameters
from shardwright.observe.run_folder import check_name, free_name, show_path
from shardwright.observe.run_record import (
    Again,
    BegunRun,
    RunRecord,
    begin_run,
    choose_run,
    go_on,
    going_further,
)
from shardwright.plan import Plan
from shardwright.quantities import MOST_RANKS_OF_HOST, MOST_RESTARTS, MOST_SECONDS, cores_of_host, counted


class Device(StrEnum):
    """The devices on which ranks compute."""

    AUTO = "auto"
    CPU = "cpu"


Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python script; with -m, a module.")]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="What the script gets.")]
IsModule = Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is the name of a module.")]
_OWN_NAMES = ("localhost", "127.0.0.1", "[::1]")
"""Endpoints of torchrun lines for one host."""
_CROWD = 8
"""So many ranks a core, and a note says that they are many."""
_RUNS = Path("runs")
_NUM_RANKS = ("--num-ranks", "-n", "--nproc-per-node")  # the last as torchrun has it
_OURS = ("--set", "--plan", "--run-dir")
"""Options that hardly any script has."""
NumRanks = Annotated[
    int | None,
    typer.Option(
        *_NUM_RANKS, min=1, max=MOST_RANKS_OF_HOST, help="Ranks on this host; default: its GPUs, or 1."
    ),
]
MaxRestarts = Annotated[
    int,
    typer.Option(
        "--max-restarts", min=0, max=MOST_RESTARTS, help="How often all ranks start again after a failure."
    ),
]
MinNodes = Annotated[
    int | None,
    typer.Option(
        "--min-nodes",
        min=1,
        help="Hosts that are enough: when one is lost, the others go on; when it is back, it joins in.",
    ),
]
PlanFile = Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="Plan to follow.")]
RunDir = Annotated[Path, typer.Option("--run-dir", metavar="DIR", help="Folder that holds the run folders.")]
Name = Annotated[
    str | None, typer.Option("--name", help="Name of the run folder; default: that of the script.")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue the newest run of SCRIPT that has a checkpoint.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Begin a new run, where the command was given before.")]
Grace = Annotated[
    float,
    typer.Option(
        "--grace", min=0.0, max=MOST_SECONDS, metavar="SECONDS", help="Time to save after Ctrl-C or SIGTERM."
    ),
]
Chaos = Annotated[
    Path | None,
    typer.Option("--chaos", metavar="FILE", help="Faults that are to happen (docs/testing.md)."),
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
    min_nodes: MinNodes = None,
    max_restarts: MaxRestarts = 0,
    plan: PlanFile = None,
    config: ConfigFile = None,
    settings: Settings = None,
    run_dir: RunDir = _RUNS,
    name: Name = None,
    resume: Resume = False,
    fresh: Fresh = False,
    grace_s: Grace = 30.0,
    device: OnDevice = Device.AUTO,
    mp_parameters: MpParameters = None,
    chaos: Chaos = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run a script on several ranks of this host, or of several hosts.

    Options of shardwright come before the script; what follows the script belongs to it. For example:

    shardwright run -n 2 --set microbatches=4 train.py --epochs 3

    The same command again continues a run that was stopped, from its last checkpoint.
    """
    atexit.register(gc.freeze)  # the interpreter's last collections would look at all of PyTorch: 0.3 s
    if as_json and not dry_run:
        raise UsageError(
            "--json is for --dry-run: what a script prints is its own. Add --dry-run, or drop it."
        )
    of_option = _of_option(run_dir)
    run_dir, name = _where(run_dir, name, config, settings or ())
    if num_nodes > 1 and name is None:
        raise UsageError(f"--nnodes {num_nodes} needs --name, so that all hosts write into one run folder.")
    if name is not None:
        check_name(name)
    again = _again(name=name, resume=resume, fresh=fresh)
    request = LaunchRequest(
        target=script,
        is_module=is_module,
        arguments=tuple(arguments or ()),
        num_ranks=num_ranks or 1,
        num_nodes=num_nodes,
        node_rank=node_rank,
        endpoint=endpoint,
        min_nodes=min_nodes,
        max_restarts=max_restarts,
        run_folder=run_dir / (name or "run"),
        plan=plan,
        config=config,
        settings={**of_option, **parse_settings(settings or ())},
        grace_s=grace_s,
        quiet=quiet,
        device=device.value,
        mp_parameters=None if mp_parameters is None else _read_mp_parameters(mp_parameters),
        chaos=chaos,
    )
    _check_settings(request)
    # Last, because it imports torch: mistakes are told before.
    if num_ranks is None and device is not Device.CPU:
        request = dataclasses.replace(request, num_ranks=_num_devices())
    _check_ranks(request)
    if chaos is not None:
        from shardwright.testing.faults import Faults  # the tools of tests, which few runs need

        Faults.read(chaos).check(request.num_ranks * num_nodes)
    if not quiet:
        _note_misplaced(script, arguments or (), num_ranks=num_ranks)
        _note_crowd(request)
        _note_lone_host(request)
    command = _command(request)
    if dry_run:
        if name is None:
            choice = choose_run(run_dir, command, again=again)
            folder = choice.continued
            path = run_dir / free_name(run_dir, choice.stem or "run") if folder is None else folder.path
            request = dataclasses.replace(request, run_folder=path)
        show_text(_as_json(request) if as_json else torchrun_line(request, os.environ))
        return
    if request.endpoint is not None and num_nodes > 1:
        check_endpoint(request.endpoint, os.environ, say=say)
    begun = begin_run(
        run_dir,
        command,
        name=name,
        part="logs" if num_nodes == 1 else None,  # the launchers of several hosts share the folder
        again=again,
        resume_by=going_further(command),
    )
    request = dataclasses.replace(request, run_folder=begun.folder.path)
    _launch(request, begun, quiet=quiet, verbose=verbose)


def _of_option(run_dir: Path) -> dict[str, str]:
    """The setting by which ``--run-dir`` wins over that of a script, which may be "off"."""
    return {} if run_dir == _RUNS else {"run_dir": str(run_dir)}


def _where(
    run_dir: Path, name: str | None, config: Path | None, settings: Sequence[str]
) -> tuple[Path, str | None]:
    """The folder of run folders and the name of the new one: by options, or else by settings."""
    given = read_settings(config if config is not None and config.is_file() else None)
    given |= parse_settings(settings)
    named, where = given.get("run_name"), given.get("run_dir", "off")
    if run_dir == _RUNS and where != "off":  # the launcher's logs need a folder
        run_dir = Path(where)
    return run_dir, str(named) if name is None and named is not None else name


def _again(*, name: str | None, resume: bool, fresh: bool) -> Again:
    if resume and fresh:
        raise UsageError("--resume continues a run, and --fresh begins one. Leave one of them out.")
    if name is not None and (resume or fresh):
        raise UsageError(
            f"--name {name} names the run folder, so {'--resume' if resume else '--fresh'} has nothing to "
            f"choose. Leave it out: a run in that folder goes on, and another name begins a new one."
        )
    return "resume" if resume else "fresh" if fresh else "auto"


def _command(request: LaunchRequest) -> RunRecord:
    """What is run, by which another run of the same is known."""
    settings = {**read_settings(request.config), **request.settings}
    settings.pop("run_dir", None)  # the folder may be moved
    if request.plan is not None:
        settings["plan"] = str(request.plan.absolute())
    if request.mp_parameters is not None:
        settings["mp_parameters"] = dict(request.mp_parameters)
    words = sys.argv[1:]
    own = len(words) - len(request.arguments)  # what follows belongs to the script
    words = [word for place, word in enumerate(words) if place >= own or word != "--fresh"]
    return RunRecord(
        script=request.named_after,
        arguments=request.arguments,
        settings=json.loads(json.dumps(settings, default=str)),
        command=shlex.join(["shardwright", *words]),
    )


def _launch(request: LaunchRequest, begun: BegunRun, *, quiet: bool, verbose: bool) -> None:
    if not quiet:
        ranks = "1 rank" if request.num_ranks == 1 else f"{request.num_ranks} ranks"
        where = f" on each of {request.num_nodes} hosts" if request.num_nodes > 1 else ""
        goes_on = "" if begun.saved is None else f", goes on from {begun.saved}"
        anew = " (a new run: --fresh)" if goes_on and not begun.record.named else ""
        say(f"shardwright run: {ranks}{where}, run folder {begun.folder}{goes_on}{anew}")
    if begun.remark:
        say(begun.remark)
    if request.chaos is not None and (notes := begun.folder.path / "faults.jsonl").is_file():
        say(f"note: the faults in {show_path(notes)} have happened, and come no more; anew: --fresh")
    try:
        code = launch(request, report=say, verbose=verbose)
    except BaseException:
        begun.record.ended(begun.folder, FAILED)
        raise
    record = begun.record.ended(begun.folder, code)
    if not begun.folder.path.is_dir():
        say(f"the run folder {begun.folder} has gone, deleted or moved: nothing tells of this run")
    if code and (how := go_on(begun.folder, record)):
        say(how)
    sys.exit(code)


def _note_crowd(request: LaunchRequest) -> None:
    """Says so where each core gets many ranks: they take minutes to start, one after the other."""
    cores = cores_of_host()
    if request.num_ranks >= _CROWD * cores:
        say(
            f"note: {request.num_ranks} ranks on {counted(cores, 'core')}: they start slowly, and compute "
            f"one after the other. As many as cores: shardwright run -n {cores}"
        )


def _note_lone_host(request: LaunchRequest) -> None:
    """Says so where an endpoint has nobody to meet: each host would train a model of its own."""
    if request.num_nodes == 1 and request.endpoint and request.endpoint.rpartition(":")[0] not in _OWN_NAMES:
        say(
            f"note: --rdzv-endpoint {request.endpoint} is not used, for these ranks meet no other host. "
            "For several hosts, add their number: --nnodes 2"
        )


def _note_misplaced(script: str, arguments: Sequence[str], *, num_ranks: int | None) -> None:
    """Says so where an option of ours stands behind the script, which then gets it."""
    words = [word.partition("=")[0] for word in arguments]
    wanted = (*(_NUM_RANKS if num_ranks is None else ()), *_OURS)
    found = next((word for word in words if word.replace("_", "-") in wanted), None)
    if found is not None:
        value = {"--set": "KEY=VALUE", "--plan": "FILE", "--run-dir": "DIR"}.get(found.replace("_", "-"), 2)
        say(
            f"note: {found} stands after {script}, so {script} gets it. For shardwright, put it before: "
            f"shardwright run {found} {value} {script}"
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


def _check_settings(request: LaunchRequest) -> tuple[Config, Plan | None]:
    """Finds here what otherwise each rank would complain about."""
    config = Config.merge(read_settings(request.config), request.settings)
    path = request.plan or config.plan_file
    return config, None if path is None else Plan.read(path)


def _check_ranks(request: LaunchRequest) -> None:
    """Refuses degrees, or a plan, for another number of ranks than are to be started."""
    config, plan = _check_settings(request)
    world_size = request.num_ranks * request.num_nodes
    if plan is not None:
        plan.check_world(world_size)
    elif any(name.endswith("_degree") for name in config.pins):
        config.resolve_world(world_size)


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
