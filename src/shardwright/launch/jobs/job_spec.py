"""The resolved specification of a training job, the only input of an engine."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shardwright.launch.processes.process_text import check_process
from shardwright.launch.ranks.hyperparameters import hyperparameter_variables, to_text
from shardwright.launch.ranks.rank_environment import CHANNEL_PREFIX, as_json, rank_variables
from shardwright.launch.ranks.smp_parameters import encode_smp_parameters
from shardwright.launch.ranks.training_environment import PARAMETERS_VARIABLE, result_folders

__all__ = ["JobSpec", "own_environ"]

# A job inherits nothing of the place in which it is submitted, which may be a job itself.
_OF_ANOTHER_JOB = ("SM_", "OMPI_", "TRAINING_JOB_NAME", "TORCHELASTIC_", "GROUP_", "ROLE_")
_OF_ANOTHER_RANK = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *(f"SHARDWRIGHT_{name}" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")),
        *(f"SHARDWRIGHT_{name}" for name in ("RUN_DIR", "PLAN", "CONFIG", "SET", "QUIET", "DEVICE", "EXITS")),
        *("SHARDWRIGHT_SECRET", "SHARDWRIGHT_SECRET_FILE"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A training job.

    Attributes:
        name: its name, and that of its run folder.
        entry_point: the script, relative to `source_dir`.
        source_dir: the folder in which the script starts, absolute.
        hyperparameters: the same by name, those of the model parallel library included.
        channels: folders of data by the names of their channels.
        gpus_per_host: GPUs that each host should have; 0 where ranks compute on CPUs.
        instance_type: the kind of machine, as it was asked for.
        device: ``cpu`` runs a script that is written for CUDA on the CPU.
        runs_dir: the folder that holds the run folders, absolute.
        environment: variables that were asked for.
        import_folders: folders to import from, besides that of the script.
        mp_parameters: of the model parallel library.
        framework_params: what ``SM_FRAMEWORK_PARAMS`` says.
        max_run_s: stops the job after so long; None for no limit.
        max_restarts: how often all ranks start again after a failure.
        image: a container image, for engines that need one.
    """

    name: str
    entry_point: str
    source_dir: Path
    words: tuple[str, ...] = ()
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    channels: Mapping[str, str] = field(default_factory=dict)
    num_hosts: int = 1
    processes_per_host: int = 1
    gpus_per_host: int = 0
    instance_type: str = "local"
    device: Literal["auto", "cpu"] = "auto"
    runs_dir: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    import_folders: tuple[str, ...] = ()
    mp_parameters: Mapping[str, Any] | None = None
    framework_params: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    max_run_s: float | None = None
    max_restarts: int = 0
    image: str | None = None

    def __post_init__(self) -> None:
        variables = self.variables()
        numbers = {"RANK": "0", "WORLD_SIZE": str(self.num_ranks), "GROUP_WORLD_SIZE": str(self.num_hosts)}
        numbers |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(self.processes_per_host)}
        check_process(
            [self.entry_point, *self.words], {**variables, **rank_variables({**variables, **numbers})}
        )

    @property
    def run_folder(self) -> Path:
        """The folder of logs and results."""
        return self.runs_dir / self.name

    @property
    def logs(self) -> Path:
        """The folder of the logs."""
        return self.run_folder / "logs"

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.processes_per_host

    def variables(self, *, source_dir: str | None = None, run_folder: Path | None = None) -> dict[str, str]:
        """The variables for the launcher of each host; it works out the rest (training_environment.py)."""
        folders = result_folders(run_folder or self.run_folder)
        chosen = {
            **{f"{CHANNEL_PREFIX}{name.upper()}": path for name, path in self.channels.items()},
            **hyperparameter_variables(self.hyperparameters),
            "SM_HPS": to_text(dict(self.hyperparameters)),
            "SM_USER_ARGS": as_json(list(self.words)),
            "SM_USER_ENTRY_POINT": self.entry_point,
            "SM_MODULE_DIR": source_dir or str(self.source_dir),
            **{name: str(path) for name, path in folders.items()},
            "SM_FRAMEWORK_PARAMS": as_json(dict(self.framework_params)),
            "TRAINING_JOB_NAME": self.name,
        }
        if self.mp_parameters is not None:
            chosen[PARAMETERS_VARIABLE] = encode_smp_parameters(self.mp_parameters)
        if self.settings:
            chosen["SHARDWRIGHT_SET"] = json.dumps(dict(self.settings))
        return {**chosen, **self.environment}

    def words_of_launcher(
        self, *, python: str, runs_dir: str | None = None, node_rank: str = "0", endpoint: str = ""
    ) -> list[str]:
        """The command of one host, run in `source_dir`."""
        words = [python, "-P", "-m", "shardwright", "run", "--nproc-per-node", str(self.processes_per_host)]
        if self.num_hosts > 1:
            words += ["--nnodes", str(self.num_hosts), "--node-rank", node_rank, "--rdzv-endpoint", endpoint]
        words += ["--run-dir", runs_dir or str(self.runs_dir), "--name", self.name]
        if self.max_restarts:
            words += ["--max-restarts", str(self.max_restarts)]
        if self.device == "cpu":
            words += ["--device", "cpu"]
        return [*words, self.entry_point, *self.words]


def own_environ(spec: JobSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a job's launcher on this machine."""
    kept = {
        name: value
        for name, value in environ.items()
        if not name.startswith(_OF_ANOTHER_JOB) and name not in _OF_ANOTHER_RANK
    }
    folders = [*spec.import_folders, *filter(None, [kept.get("PYTHONPATH")])]
    if folders:
        kept["PYTHONPATH"] = os.pathsep.join(folders)
    return {**kept, **spec.variables()}
