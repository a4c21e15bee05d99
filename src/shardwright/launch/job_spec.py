"""A training job, resolved: settings, data and script files, the only input of an engine."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlparse

from shardwright.errors import ConfigError
from shardwright.launch.processes import check_process
from shardwright.launch.ranks.rank_environment import (
    CHANNEL_PREFIX,
    as_json,
    hyperparameter_variables,
    rank_variables,
    to_text,
)
from shardwright.launch.ranks.request import PARAMETERS_VARIABLE, result_folders
from shardwright.launch.ranks.smp_parameters import encode_smp_parameters

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
        source_dir: the folder in which the script starts, absolute.
        hyperparameters: the same by name, those of the model parallel library included.
        channels: folders of data by the names of their channels.
        gpus_per_host: GPUs that each host should have; 0 where ranks compute on CPUs.
        instance_type: the kind of machine, as it was asked for.
        device: ``cpu`` runs a script that is written for CUDA on the CPU.
        runs_dir: the folder that holds the run folders, absolute.
        import_folders: folders to import from, besides that of the script.
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
        return self.runs_dir / self.name

    @property
    def logs(self) -> Path:
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


_ALONE = "training"
"""The channel of inputs that have no name, as SageMaker calls it."""

_NAME = re.compile(r"[A-Za-z0-9._-]+")


def read_channels(
    inputs: Any, *, s3_to_local: Mapping[str, str | os.PathLike[str]], must_exist: bool = True
) -> dict[str, str]:
    """The folders by the names of their channels, absolute."""
    if inputs is None:
        return {}
    named = inputs if isinstance(inputs, Mapping) else {_ALONE: inputs}
    channels: dict[str, str] = {}
    for name, value in named.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(
                f"an input is called {name!r}, but the name of a channel is of letters, digits, '-', '_' "
                "and '.', such as train."
            )
        path = local_path(_address(value, name), what=f"input {name}", s3_to_local=s3_to_local)
        channels[name] = _checked(path, name) if must_exist else str(path)
    return channels


def local_path(address: str, *, what: str, s3_to_local: Mapping[str, str | os.PathLike[str]]) -> Path:
    """The path of an address: a path, a ``file://`` address, or one in S3 for which a folder stands."""
    if address.startswith("s3://"):
        return _instead_of_s3(address, what, s3_to_local)
    parts = urlparse(address)
    if parts.scheme == "file":
        return Path(
            unquote(f"/{parts.netloc}{parts.path}" if parts.netloc not in ("", "localhost") else parts.path)
        )
    if "://" in address:
        raise ConfigError(f"{what} is {address}, but only folders can be read. Copy it, and give the folder.")
    return Path(address).expanduser()


def _instead_of_s3(address: str, what: str, s3_to_local: Mapping[str, str | os.PathLike[str]]) -> Path:
    """The mapping with the longest address that `address` begins with."""
    for prefix in sorted(s3_to_local, key=len, reverse=True):
        stem = prefix.rstrip("/")
        if address.rstrip("/") == stem or address.startswith(f"{stem}/"):
            return Path(s3_to_local[prefix]).expanduser() / address[len(stem) :].strip("/")
    bucket = "/".join(address.split("/")[:3])
    raise ConfigError(
        f"{what} is {address}, and S3 is not read here. Copy it (aws s3 sync {address} data) and give the "
        "local folder, or say where the copy of the bucket is: "
        f'Estimator(..., s3_to_local={{"{bucket}": "data"}}).'
    )


def _address(value: Any, name: str) -> str:
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    # SageMaker's TrainingInput and its like keep what they are in a dictionary of that shape.
    config = getattr(value, "config", None)
    source = config.get("DataSource", {}) if isinstance(config, Mapping) else {}
    address = source.get("S3DataSource", {}).get("S3Uri") or source.get("FileSystemDataSource", {}).get(
        "DirectoryPath"
    )
    if not isinstance(address, str):
        raise ConfigError(
            f"input {name} is a {type(value).__name__}, but it must be the path of a folder: "
            f'fit({{"{name}": "data/{name}"}}).'
        )
    return address


def _checked(path: Path, name: str) -> str:
    if path.is_file():
        raise ConfigError(f"input {name} is the file {path}, but a channel is a folder: give {path.parent}.")
    if not path.is_dir():
        raise ConfigError(f"input {name} is {path}, but there is no such folder (looked in {Path.cwd()}).")
    return str(path.absolute())


def locate_script(
    entry_point: str | os.PathLike[str], source_dir: str | os.PathLike[str] | None
) -> tuple[Path, str]:
    """The folder in which a script starts, and its path in it."""
    script = os.fspath(entry_point)
    if source_dir is None:
        path = Path(script).expanduser().absolute()
        folder = path.parent
    else:
        text = os.fspath(source_dir)
        if "://" in text or text.endswith((".tar.gz", ".tgz")):
            raise ConfigError(
                f"source_dir is {text}, but it must be a folder. Unpack it, and give the folder."
            )
        folder = Path(text).expanduser().absolute()
        if not folder.is_dir():
            raise ConfigError(f"source_dir is {text}, but there is no such folder (looked in {Path.cwd()}).")
        path = folder / script
    if not path.is_file():
        scripts = ", ".join(sorted(file.name for file in folder.glob("*.py"))[:10]) if folder.is_dir() else ""
        there = f" It has {scripts}." if scripts else ""
        raise ConfigError(
            f"entry_point is {script}, but there is no such file in {folder}.{there} Give the path of a "
            "script"
            f"{', relative to source_dir' if source_dir is not None else ''}."
        )
    if path.suffix != ".py":
        raise ConfigError(f"entry_point is {script}, but it must be a Python script (.py).")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"entry_point is {script}, which lies outside of source_dir {folder}. Give one in it."
        )
    return folder, str(path.relative_to(folder)) if path.is_relative_to(folder) else script


def import_folder(path: str | os.PathLike[str]) -> str:
    """The folder from which a dependency is imported by its name."""
    found = Path(path).expanduser().absolute()
    if not found.exists():
        raise ConfigError(f"dependencies have {os.fspath(path)}, but there is no such file or folder.")
    return str(found.parent)
