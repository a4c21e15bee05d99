"""A launch request, the variables that its ranks' scripts read, and its command line of torchrun.

This takes two steps, since a launcher does not know its host's number before the hosts have met::

    job_variables    before the ranks start, once a host: SM_HPS, SM_MODEL_DIR, SM_CHANNELS, SM_NUM_GPUS, ...
    rank_variables   in the supervisor of each rank (rank_environment.py): SM_HOSTS, SM_CURRENT_HOST,
                     SM_TRAINING_ENV, OMPI_*, ...

Variables that are already set stay: by a user, by `Estimator`, by SageMaker itself. Only the ranks' own
numbers (``OMPI_COMM_WORLD_*``) are always those of this run. ``RANK`` and ``WORLD_SIZE`` are set too, and
precede all of them in the order in which Shardwright looks for its launcher.

It imports no framework.
"""

import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shardwright.errors import UsageError
from shardwright.launch.processes import without_too_long
from shardwright.launch.ranks.rank_environment import (
    FRAMEWORK_MODULE,
    channels_of,
    from_words,
    hyperparameter_variables,
    json_or,
    missing,
    to_text,
)
from shardwright.launch.ranks.smp_parameters import encode_smp_parameters, read_smp_parameters
from shardwright.quantities import MOST_NODES, MOST_RANKS_OF_HOST, MOST_RESTARTS, MOST_SECONDS, cores_of_host
from shardwright.text import control_in, shown

CPU_MODE = "shardwright.cpu_mode"
"""The module that starts a script in CPU mode."""

_STARTERS = (CPU_MODE, "shardwright.integrations")
"""Modules that run the script or module behind them."""

_SHELL = (".sh", ".bash", ".slurm", ".sbatch")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """The script to launch, and how.

    Attributes:
        node_rank: number of this host; None lets the hosts number themselves.
        endpoint: where the hosts meet, as ``host:port``; None on a single host.
        min_nodes: hosts that are enough to go on when others are lost; None: all of them must be there.
        max_restarts: how often all ranks are started again after a failure.
        run_folder: where logs and results go; it must exist, with ``logs/`` in it, when the launch begins.
        settings: single settings for the ranks, stronger than the file.
        grace_s: seconds that ranks may take to end after a signal.
        device: ``cpu`` runs a script that is written for CUDA on the CPU; ``auto`` leaves it as it is.
        mp_parameters: of SageMaker's model parallel library, for scripts that use its names.
    """

    target: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    num_ranks: int = 1
    num_nodes: int = 1
    node_rank: int | None = None
    endpoint: str | None = None
    min_nodes: int | None = None
    max_restarts: int = 0
    run_folder: Path
    plan: Path | None = None
    config: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    grace_s: float = 30.0
    quiet: bool = False
    device: Literal["auto", "cpu"] = "auto"
    mp_parameters: Mapping[str, Any] | None = None
    chaos: Path | None = None

    def __post_init__(self) -> None:
        self._check_names()
        self._check_numbers()
        if not self.is_module and not Path(self.target).is_file():
            raise UsageError(_no_script(self.target, self.arguments))
        if not self.is_module and self.target.endswith(".ipynb"):
            raise UsageError(
                f"{self.target} is a notebook, and no script. Start ranks from inside of it with "
                f"sw.notebook_launcher(train, {self.num_ranks}), or make a script of it: "
                f"jupyter nbconvert --to script {shlex.quote(self.target)}"
            )
        if not self.is_module and self.target.endswith(_SHELL):
            raise UsageError(
                f"{self.target} is a shell script, and ranks run Python. Give the Python script that it "
                "starts: shardwright run -n 2 train.py; or write that line into it, and start it with sh."
            )
        for what, path in (("plan", self.plan), ("config", self.config)):
            if path is not None and not path.exists():
                raise UsageError(f"--{what} {path}: there is no such file. Give the path of a {what} file.")
        if self.num_nodes > 1 and not self.endpoint:
            raise UsageError(
                f"--nnodes {self.num_nodes} needs --rdzv-endpoint HOST:PORT, the same on every host, "
                "where HOST is one of them."
            )
        if self.min_nodes is not None and self.num_nodes == 1:
            raise UsageError("--min-nodes is for runs of several hosts. Give their number by --nnodes.")
        if self.min_nodes is not None and not 1 <= self.min_nodes <= self.num_nodes:
            raise UsageError(
                f"--min-nodes is {self.min_nodes}, but it must be from 1 to the {self.num_nodes} of --nnodes."
            )
        if self.min_nodes is not None and (self.node_rank is not None or not self.max_restarts):
            raise UsageError(
                "--min-nodes lets hosts come and go: leave out --node-rank, by which each is expected, and "
                "set --max-restarts, for each loss of a host starts the ranks again."
            )
        if self.node_rank is not None and not 0 <= self.node_rank < self.num_nodes:
            raise UsageError(
                f"--node-rank {self.node_rank} is not in 0 to {self.num_nodes - 1}, "
                f"for --nnodes is {self.num_nodes}."
            )

    def _check_names(self) -> None:
        named: dict[str, str | Path | None] = {
            "the script": self.target,
            "the run folder": self.run_folder,
            "--plan": self.plan,
            "--config": self.config,
            "--rdzv-endpoint": self.endpoint,
        }
        for what, name in named.items():
            if name is not None and (control := control_in(str(name))) is not None:
                raise UsageError(
                    f"{what} is {shown(str(name))}, but it must not have control characters such as "
                    f"{control}."
                )

    def _check_numbers(self) -> None:
        for what, number, least, most in (
            ("--num-ranks", self.num_ranks, 1, MOST_RANKS_OF_HOST),
            ("--nnodes", self.num_nodes, 1, MOST_NODES),
            ("--max-restarts", self.max_restarts, 0, MOST_RESTARTS),
            ("--grace", self.grace_s, 0, MOST_SECONDS),
        ):
            if not least <= number <= most:  # so that NaN is refused, too
                raise UsageError(f"{what} is {shown(number)}, but it must be from {least} to {most:g}.")
        host, _, port = (self.endpoint or "localhost:1").rpartition(":")
        is_name = host and (":" not in host or (host.startswith("[") and host.endswith("]")))
        if not is_name or not (port.isdecimal() and len(port) < 6 and 0 < int(port) < 2**16):
            raise UsageError(
                f"--rdzv-endpoint is {shown(self.endpoint)}, but it must be HOST:PORT, with a port from 1 to "
                "65535."
            )

    @property
    def logs(self) -> Path:
        return self.run_folder / "logs"

    @property
    def script(self) -> tuple[str, ...]:
        starter = ("-m", CPU_MODE) if self.device == "cpu" else ()
        return (*starter, *(("-m",) if self.is_module else ()), self.target, *self.arguments)

    @property
    def named_after(self) -> str:
        """What the run is named after and known by: the path of the script, or a module's name."""
        words = (*(("-m",) if self.is_module else ()), self.target, *self.arguments)
        while words[:1] == ("-m",) and words[1] in _STARTERS and words[2:]:
            words = words[2:]
        return words[1] if words[0] == "-m" and words[1:] else str(Path(words[0]).absolute())

    def worker_environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables to set for the ranks, besides those of `environ`."""
        chosen = {"SHARDWRIGHT_RUN_DIR": str(self.run_folder.absolute())}
        if self.plan is not None:
            chosen["SHARDWRIGHT_PLAN"] = str(self.plan.absolute())
        if self.config is not None:
            chosen["SHARDWRIGHT_CONFIG"] = str(self.config.absolute())
        if self.settings:
            chosen["SHARDWRIGHT_SET"] = json.dumps(dict(self.settings))
        if self.device != "auto":
            chosen["SHARDWRIGHT_DEVICE"] = self.device
        if self.mp_parameters is not None:
            chosen["SM_HP_MP_PARAMETERS"] = encode_smp_parameters(self.mp_parameters)
        if self.chaos is not None:
            chosen["SHARDWRIGHT_CHAOS"] = str(self.chaos.absolute())
        if self.quiet:
            chosen["SHARDWRIGHT_QUIET"] = "1"
        if sys.stderr.isatty():  # ranks write to pipes, which end there
            chosen["SHARDWRIGHT_TERMINAL"] = "1"
        if "OMP_NUM_THREADS" not in environ:
            chosen["OMP_NUM_THREADS"] = str(max(1, cores_of_host() // self.num_ranks))
        return chosen


def _no_script(target: str, arguments: Sequence[str]) -> str:
    whole = f"{target} {arguments[0]}" if arguments else ""
    if whole and Path(whole).is_file():
        return f'There is no script {target}, but "{whole}". Put quotes around it: shardwright run "{whole}"'
    if Path(target).name.rstrip("0123456789.") == "python":
        rest = shlex.join(arguments) or "train.py"
        return f"{target} is no script: ranks are started with it as it is. Write shardwright run {rest}"
    if Path(target).is_dir():
        return (
            f"{target} is a folder. Give the path of a script: shardwright run {target.rstrip('/')}/train.py"
        )
    if "/" not in target and not target.endswith(".py"):
        return (
            f"There is no script {target} in {Path.cwd()}. Give the path of a script, as in "
            f"shardwright run train.py, or for a module: shardwright run -m {target}"
        )
    return (
        f"There is no script {target} (looked in {Path.cwd()}). Check the path: shardwright run -n 2 train.py"
    )


PARAMETERS_VARIABLE = "SM_HP_MP_PARAMETERS"
"""The parameters of the model parallel library, as JSON."""


def framework_parameters(
    *,
    mpi: bool,
    processes_per_host: int,
    mpi_options: str = "",
    dataparallel: bool = False,
    instance_type: str = "local",
) -> dict[str, Any]:
    """The description in ``SM_FRAMEWORK_PARAMS`` of how ranks were started."""
    return {
        "sagemaker_mpi_enabled": mpi,
        "sagemaker_mpi_num_of_processes_per_host": processes_per_host,
        "sagemaker_mpi_custom_mpi_options": mpi_options,
        "sagemaker_distributed_dataparallel_enabled": dataparallel,
        "sagemaker_instance_type": instance_type,
    }


def result_folders(run_folder: Path) -> dict[str, Path]:
    """The folders for a script's results, by the variables that name them."""
    output = run_folder / "output"
    return {
        "SM_MODEL_DIR": run_folder / "model",
        "SM_OUTPUT_DATA_DIR": output / "data",
        "SM_OUTPUT_DIR": output,
    }


def job_variables(request: LaunchRequest, environ: Mapping[str, str], *, num_gpus: int) -> dict[str, str]:
    """The variables that are the same on all hosts, those only that `environ` lacks."""
    hyperparameters = from_words(request.arguments)
    if isinstance(words := hyperparameters.get("mp_parameters"), str):
        hyperparameters["mp_parameters"] = read_smp_parameters(words)
    known = {
        **{name: str(path.absolute()) for name, path in result_folders(request.run_folder).items()},
        "SM_HPS": to_text(hyperparameters),
        "SM_USER_ARGS": to_text(list(request.arguments)),
        "SM_USER_ENTRY_POINT": request.target if request.is_module else Path(request.target).name,
        "SM_MODULE_DIR": str(Path.cwd() if request.is_module else Path(request.target).absolute().parent),
        "SM_NUM_GPUS": str(num_gpus),
        "SM_NUM_CPUS": str(cores_of_host()),
        "SM_LOG_LEVEL": "20",
        "SM_FRAMEWORK_MODULE": FRAMEWORK_MODULE,
        "TRAINING_JOB_NAME": request.run_folder.name,
    }
    known |= {name: value for name, value in environ.items() if name in known and value}
    hyperparameters = json_or(known["SM_HPS"], {})
    known |= hyperparameter_variables(hyperparameters)
    if isinstance(parameters := hyperparameters.get("mp_parameters"), dict):
        known[PARAMETERS_VARIABLE] = encode_smp_parameters(parameters)
    known["SM_MODULE_NAME"] = known["SM_USER_ENTRY_POINT"].removesuffix(".py")
    channels = channels_of(environ)
    known["SM_CHANNELS"] = to_text(sorted(channels))
    known["SM_INPUT_DATA_CONFIG"] = to_text({name: {"TrainingInputMode": "File"} for name in channels})
    known["SM_FRAMEWORK_PARAMS"] = to_text(
        framework_parameters(
            mpi=bool(environ.get(PARAMETERS_VARIABLE) or known.get(PARAMETERS_VARIABLE)),
            processes_per_host=request.num_ranks,
            instance_type="local_gpu" if num_gpus and request.device != "cpu" else "local",
        )
    )
    return without_too_long(missing(known, environ))


def as_it_is(words: Iterable[str]) -> list[str]:
    """Words that reach scripts unchanged: torchelastic takes each for a template, for `${local_rank}`.

    >>> as_it_is(["pa$$word", "--epochs"])
    ['pa$$$$word', '--epochs']
    """
    return [word.replace("$", "$$") for word in words]


def torchrun_command(request: LaunchRequest) -> list[str]:
    """The words of the command line."""
    words = ["torchrun"]
    if request.num_nodes == 1:
        words += ["--standalone", "--local-addr=127.0.0.1"]
    elif request.node_rank is None:
        words += [
            f"--nnodes={f'{request.min_nodes}:' if request.min_nodes else ''}{request.num_nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={request.endpoint}",
        ]
    else:
        host, _, port = (request.endpoint or "").rpartition(":")
        words += [f"--nnodes={request.num_nodes}", f"--node-rank={request.node_rank}"]
        words += [f"--master-addr={host}", f"--master-port={port}"]
    words += [f"--nproc-per-node={request.num_ranks}", f"--max-restarts={request.max_restarts}"]
    words += [f"--log-dir={request.logs}", "--redirects=3", "--tee=3"]
    return [*words, *as_it_is(request.script)]


def torchrun_line(request: LaunchRequest, environ: Mapping[str, str]) -> str:
    """The command line for a shell: makes the run folder, sets the variables, starts torchrun."""
    variables = [f"{name}={value}" for name, value in request.worker_environ(environ).items()]
    make_folder = shlex.join(["mkdir", "-p", str(request.logs)])
    return f"{make_folder} && {shlex.join(['env', *variables, *torchrun_command(request)])}"
