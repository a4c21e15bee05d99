"""Training jobs in the form of SageMaker's Python SDK, run on your own machines."""

import inspect
import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from shardwright.config import Config
from shardwright.errors import ConfigError, UsageError
from shardwright.launch.distribution import Distribution, read_distribution
from shardwright.launch.engines.engine import Engine
from shardwright.launch.engines.local import Local
from shardwright.launch.job_spec import JobSpec, import_folder, local_path, locate_script, read_channels
from shardwright.launch.placement import ALIASES, LOCAL, place_processes, sort_out
from shardwright.launch.processes import check_count, check_variables, shown
from shardwright.launch.ranks.rank_environment import to_words, with_plain_values
from shardwright.launch.ranks.request import framework_parameters
from shardwright.launch.ranks.smp_parameters import check_world
from shardwright.launch.running_job import RunningJob
from shardwright.quantities import MOST_NODES, MOST_RESTARTS
from shardwright.text import control_in, printable

_MP_PARAMETERS = "mp_parameters"
_MODULE_DIR = "SM_MODULE_DIR"
_LONGEST_BASE = 24  # with the time behind it, and a host's number, it is still the name of a host
_MOST_RUN_S = 1e9
# Bytes of a path that are no UTF-8, as Python has them.
_NOT_TEXT = re.compile("[\udc80-\udcff]")
_JOB_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")


class Estimator:
    """Trains with a script: on this machine, or where an engine takes it.

    ::

        from shardwright.launch import Estimator

        estimator = Estimator(
            entry_point="train.py",
            source_dir="src",
            instance_type="local",
            distribution={
                "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"partitions": 2}}},
                "mpi": {"enabled": True, "processes_per_host": 2},
            },
            hyperparameters={"epochs": 3},
        )
        estimator.fit({"train": "data/train"})

    The arguments are those of ``sagemaker.pytorch.PyTorch``, and these:

    Args:
        entry_point: the script; relative to `source_dir`, if that is given.
        source_dir: the folder of the script, in which it starts.
        hyperparameters: options of the script, by name.
        distribution: how processes are started, and what they are told, in the forms of
            `shardwright.launch.distribution`.
        instance_type: ``local`` (this machine's CPUs, in CPU mode), ``local_gpu``, or a kind of machine such
            as ``ml.p4d.24xlarge``, which says how many GPUs a host has.
        instance_count: hosts.
        engine: where jobs run: `Local` (the default), `LocalCluster`, `Slurm`, `Kubernetes`, `Ray`.
        device: ``cpu`` runs scripts that are written for CUDA on the CPU; ``auto`` leaves them as they are;
            None is ``cpu`` for instance_type ``local``, else ``auto``.
        processes_per_host: ranks on each host, where `distribution` does not say it.
        environment: environment variables for the script.
        dependencies: folders and files that the script imports from elsewhere.
        output_path: the folder in which each job gets a folder of its name.
        base_job_name: what names of jobs begin with.
        max_run: seconds after which a job is stopped.
        max_restarts: how often all ranks start again after a failure.
        image_uri: the container image, for engines that need one.
        s3_to_local: folders that stand for addresses in S3: ``{"s3://bucket": "data"}``.
        arguments: all others of SageMaker's estimators; docs/estimator.md says what becomes of each.

    Raises:
        ConfigError: arguments contradict each other, or ask for what is not there.

    Attributes:
        latest_training_job: what `fit` started last.
        jobs: all that `fit` started.
    """

    def __init__(
        self,
        entry_point: str | os.PathLike[str],
        *,
        source_dir: str | os.PathLike[str] | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        distribution: Mapping[str, Any] | None = None,
        instance_type: str = LOCAL,
        instance_count: int = 1,
        engine: Engine | None = None,
        device: Literal["auto", "cpu"] | None = None,
        processes_per_host: int | None = None,
        environment: Mapping[str, str] | None = None,
        dependencies: Sequence[str | os.PathLike[str]] = (),
        output_path: str | os.PathLike[str] = "runs",
        base_job_name: str | None = None,
        max_run: float | None = None,
        max_restarts: int = 0,
        image_uri: str | None = None,
        s3_to_local: Mapping[str, str | os.PathLike[str]] | None = None,
        **arguments: Any,
    ) -> None:
        renamed = {ALIASES[name]: arguments.pop(name) for name in list(arguments) if name in ALIASES}
        self.instance_type = _name("instance_type", str(renamed.get("instance_type", instance_type)))
        count = renamed.get("instance_count", instance_count)
        self.instance_count = check_count("instance_count", count, most=MOST_NODES)
        self.engine: Engine = _engine(engine)
        self.device = _device(device, self.instance_type)
        self.s3_to_local = dict(s3_to_local or {})
        _name("output_path", os.fspath(output_path))
        self.output_path = str(
            local_path(os.fspath(output_path), what="output_path", s3_to_local=self.s3_to_local).absolute()
        )
        self.base_job_name = base_job_name
        self.image_uri = image_uri
        self.max_run: float | None = _seconds(renamed.get("max_run", max_run))
        self.max_restarts = check_count("max_restarts", max_restarts, least=0, most=MOST_RESTARTS)
        given = _dictionary("environment", environment)
        self.environment = {str(name): str(value) for name, value in given.items()}
        check_variables(self.environment, what="environment")
        self.source_dir, self.entry_point = locate_script(entry_point, source_dir)
        _name("source_dir", os.fspath(source_dir or ""))
        _name("entry_point", os.fspath(entry_point))
        self._import_folders = tuple(import_folder(path) for path in dependencies)
        self._hyperparameters = with_plain_values(_dictionary("hyperparameters", hyperparameters))
        self._distribution = read_distribution(renamed.get("distribution", distribution))
        self._placement = place_processes(
            given=processes_per_host,
            distribution=self._distribution,
            instance_type=self.instance_type,
            num_hosts=self.instance_count,
            device=self.device,
            is_here=self.engine.is_here,
        )
        self._check_parameters()
        self._warn(arguments)
        self.jobs: list[RunningJob] = []

    def _warn(self, arguments: Mapping[str, Any]) -> None:
        """Warns once of all that may not do what a user waits for."""
        known = [name for name in inspect.signature(Estimator).parameters if name != "arguments"]
        remarks = [*self._distribution.remarks, *self._placement.remarks, *sort_out(arguments, known=known)]
        if (self.source_dir / "requirements.txt").is_file():
            remarks.append(
                f"{self.source_dir / 'requirements.txt'} is not installed by itself: pip install -r it "
                "where the ranks run"
            )
        if remarks:
            warnings.warn(f"Estimator: {'; '.join(remarks)}", stacklevel=3)

    @property
    def latest_training_job(self) -> RunningJob | None:
        """The job that `fit` started last; None before."""
        return self.jobs[-1] if self.jobs else None

    @property
    def model_data(self) -> str:
        """The folder in which the script of the latest job has saved its model.

        Raises:
            UsageError: there was no job yet.
        """
        if not self.jobs:
            raise UsageError("model_data is known once fit() was called. Call estimator.fit(...) before.")
        return str(self.jobs[-1].run_folder / "model")

    def hyperparameters(self) -> dict[str, Any]:
        """The script's hyperparameters by name, parameters of the model parallel library included."""
        smp = self._distribution.mp_parameters
        return {**({} if smp is None else {_MP_PARAMETERS: dict(smp)}), **self._hyperparameters}

    def set_hyperparameters(self, **hyperparameters: Any) -> None:
        """Adds hyperparameters, or changes them."""
        self._hyperparameters |= with_plain_values(hyperparameters)

    def fit(
        self,
        inputs: Any = None,
        wait: bool = True,
        logs: bool | str | None = "All",
        job_name: str | None = None,
        experiment_config: Any = None,
        *,
        dry_run: bool = False,
    ) -> None:
        """Trains.

        Args:
            inputs: a folder of data (channel ``training``), or folders by the names of their channels.
            wait: returns when the job has ended; else at once (see `latest_training_job`).
            logs: shows what the ranks print; ``"None"``, None or False: does not.
            job_name: name of the job and its folder; default: made from `base_job_name`, or the script, and
                the time. A name that was there before goes on in its folder.
            experiment_config: accepted, and not looked at.
            dry_run: prints what would be run or submitted, and stops.

        Raises:
            ConfigError: inputs cannot be used.
            LaunchError: the job failed; the text names the rank that failed first, and why. Its `exit_code`
                is that of docs/launch.md.
        """
        spec = self._spec(inputs, job_name)
        if dry_run:
            sys.stdout.write(f"{printable(self.engine.manifest(spec).rstrip(), lines=True)}\n")
            return
        job = self.engine.start(spec, waits=wait)
        self.jobs.append(job)
        if wait:
            job.wait(logs=logs not in (None, False, "None", "none"))

    def manifest(self, inputs: Any = None, job_name: str | None = None) -> str:
        """The text of what `fit` would run or submit: command lines, an sbatch file, a manifest."""
        return self.engine.manifest(self._spec(inputs, job_name))

    def _check_parameters(self) -> None:
        smp = self._distribution.mp_parameters
        if smp is not None and _MP_PARAMETERS in self._hyperparameters:
            raise ConfigError(
                f"{_MP_PARAMETERS} is among the hyperparameters, and in distribution, too. Give the "
                "parameters of the model parallel library in distribution only."
            )
        own = {"partitions": Config.parse(self._distribution.settings).pipeline_parallel_degree}
        check_world(
            own if smp is None else smp,
            num_hosts=self.instance_count,
            processes_per_host=self._placement.processes_per_host,
        )

    def _spec(self, inputs: Any, job_name: str | None) -> JobSpec:
        name = self._job_name(job_name)
        hyperparameters = {**self._of_framework(name), **self.hyperparameters()}
        words = to_words(hyperparameters)
        channels = read_channels(inputs, s3_to_local=self.s3_to_local, must_exist=self.engine.sees_files)
        distribution = self._distribution
        return JobSpec(
            name=name,
            entry_point=self.entry_point,
            source_dir=self.source_dir,
            words=words,
            hyperparameters=hyperparameters,
            channels=channels,
            num_hosts=self.instance_count,
            processes_per_host=self._placement.processes_per_host,
            gpus_per_host=self._placement.gpus_per_host,
            instance_type=self.instance_type,
            device=self.device,
            runs_dir=Path(self.output_path).absolute(),
            environment={**distribution.environment, **self._exported(), **self.environment},
            import_folders=self._import_folders,
            mp_parameters=distribution.mp_parameters,
            framework_params=self._framework_params(distribution),
            settings=distribution.settings,
            max_run_s=self.max_run,
            max_restarts=self.max_restarts,
            image=self.image_uri,
        )

    def _exported(self) -> dict[str, str]:
        """What a shell has exported for scripts on this machine, and that a job keeps."""
        exported = os.environ.get(_MODULE_DIR, "")
        return {_MODULE_DIR: exported} if exported and self.engine.is_here else {}

    def _framework_params(self, distribution: Distribution) -> dict[str, Any]:
        return framework_parameters(
            mpi=distribution.mpi or distribution.mp_parameters is not None,
            processes_per_host=self._placement.processes_per_host,
            mpi_options=distribution.mpi_options,
            dataparallel=distribution.dataparallel,
            instance_type=self.instance_type,
        )

    def _of_framework(self, job_name: str) -> dict[str, Any]:
        """Hyperparameters that estimators of the framework add."""
        return {}

    def _job_name(self, given: str | None) -> str:
        if given is None:
            base = re.sub(r"[^a-zA-Z0-9]+", "-", self.base_job_name or Path(self.entry_point).stem).strip("-")
            time = datetime.now().strftime("%Y-%m-%d-%H-%M-%S-%f")[:-3]
            return f"{base[:_LONGEST_BASE].strip('-') or 'job'}-{time}"
        if not _JOB_NAME.fullmatch(given):
            raise ConfigError(
                f"job_name is {shown(given)}, but it must be of 1 to 63 letters, digits and '-', with a "
                "letter or digit at both ends."
            )
        return given


def _dictionary(name: str, given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"{name} is {shown(given)}, but it must be a dictionary.")
    return given or {}


def _name(what: str, given: str) -> str:
    control = control_in(_NOT_TEXT.sub("?", given))
    if control is not None and "\0" not in given:  # of which JobSpec says why no process can get it
        raise ConfigError(f"{what} is {shown(given)}, but it must not have {control} in it.")
    return given


def _seconds(value: Any) -> float | None:
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= _MOST_RUN_S:
        raise ConfigError(
            f"max_run is {shown(value)}, but it must be a number of seconds up to {_MOST_RUN_S:g}, or None "
            "for no limit."
        )
    return float(value) if isinstance(value, float) else value


def _device(given: str | None, instance_type: str) -> Literal["auto", "cpu"]:
    if given not in (None, "auto", "cpu"):
        raise ConfigError(f"device is {shown(given)}, but it must be cpu, auto or None.")
    return "cpu" if given == "cpu" or (given is None and instance_type == LOCAL) else "auto"


def _engine(given: Any) -> Engine:
    if given is None or given == "local":
        return Local()
    if not callable(getattr(given, "start", None)) or isinstance(given, type):
        raise ConfigError(
            f"engine is {shown(given)}, but it must be an engine of shardwright.launch: Local(), "
            "LocalCluster(...), Slurm(...), Kubernetes(...) or Ray(...)."
        )
    found: Engine = given
    return found


class TensorFlow(Estimator):
    """Trains with a script for TensorFlow: arguments as for `Estimator`, and one more.

    ::

        estimator = TensorFlow(
            entry_point="train.py",
            framework_version="2.6",
            py_version="py38",
            instance_type="local",
            distribution={
                "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"partitions": 2}}},
                "mpi": {"enabled": True, "processes_per_host": 4},
            },
        )

    Args:
        entry_point: the script.
        model_dir: what the script gets as ``--model_dir``, as those for SageMaker expect: an address, or a
            folder; None for the folder of the job's model; False for none.
        arguments: as for `Estimator`.

    Raises:
        ConfigError: as for `Estimator`.
    """

    def __init__(
        self,
        entry_point: str | os.PathLike[str],
        *,
        model_dir: str | os.PathLike[str] | Literal[False] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(entry_point, **arguments)
        if isinstance(model_dir, bool) and model_dir:
            raise ConfigError("model_dir is True, but it must be a folder, False for none, or None.")
        self.model_dir = model_dir

    def _of_framework(self, job_name: str) -> dict[str, Any]:
        if self.model_dir is False:
            return {}
        if self.model_dir is not None:
            given = os.fspath(self.model_dir)
            return {"model_dir": str(local_path(given, what="model_dir", s3_to_local=self.s3_to_local))}
        return {"model_dir": str(Path(self.output_path).absolute() / job_name / "model")}
