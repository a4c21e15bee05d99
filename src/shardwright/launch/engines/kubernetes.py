"""Manifests of training jobs on Kubernetes, as a Kubeflow Trainer TrainJob or a JobSet.

``python job.py | kubectl apply -f -`` starts a job whose script prints `Estimator.manifest`. The script's
folder goes with the job (up to about 600 KiB, packed), unless the image has it. Data, and results to keep,
are on volumes.
"""

import base64
import io
import os
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NoReturn

from shardwright.comm.joining.run_secret import new_secret
from shardwright.errors import ConfigError, LaunchError
from shardwright.launch.engines.manifests import (
    Pods,
    code_map,
    is_env_name,
    job_set,
    needs_secret,
    secret_object,
    to_yaml,
    train_job,
)
from shardwright.launch.job_spec import JobSpec
from shardwright.quantities import format_bytes

_PART = 96 * 1024
"""Characters: Linux takes no variable of more than 128 KiB."""

_MOST = 9 * _PART
"""Kubernetes takes no object of more than 1 MiB."""

_LEFT_OUT = frozenset({"__pycache__", ".git", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", "runs"})


def pack(folder: Path, *, without: Path) -> list[str]:
    """The files of a folder as a compressed archive in base64, in parts; hidden files are left out."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for path in _files(folder, without):
            tar.add(path, arcname=str(path.relative_to(folder)), recursive=False)
            if archive.tell() > _MOST:
                break
    text = base64.b64encode(archive.getvalue()).decode()
    if len(text) > _MOST:
        raise ConfigError(
            f"source_dir {folder} is too big to go with the job: packed it takes more than "
            f"{format_bytes(_MOST * 3 // 4)}. Keep data out of it; or put it into the image, or on a "
            'volume, and say where it is there: Kubernetes(code="/workspace").'
        )
    return [text[start : start + _PART] for start in range(0, len(text), _PART)]


def _files(folder: Path, without: Path) -> list[Path]:
    found: list[Path] = []
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if name not in _LEFT_OUT and not name.startswith(".") and Path(place, name) != without
        )
        found += [Path(place, name) for name in sorted(files) if not name.startswith(".")]
    return found


_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_NAME = 50


class Kubernetes:
    """Prints the manifests of a job.

    Args:
        kind: ``TrainJob`` (Kubeflow Trainer 2) or ``JobSet``.
        namespace: of the cluster; None is that of kubectl's context.
        image: the container image; it has Python with Shardwright and PyTorch. None is the estimator's
            ``image_uri``, or, for a TrainJob, that of the runtime.
        runtime: the ClusterTrainingRuntime of a TrainJob.
        trainer_version: of Kubeflow's Trainer; before 2.2 it had other fields.
        code: the folder of the script in the image or on a volume; None sends the script with the job.
        runs_dir: the folder in the pods that holds the run folders; on a volume, if results are to stay.
        volumes: names of persistent volume claims, by the folders at which they are mounted.
        resources: that each pod asks for besides GPUs: ``{"cpu": "16", "memory": "64Gi"}``.
        gpu_resource: what GPUs are called in the cluster.
        node_selector: labels of nodes.
        service_account: of the pods.
        labels: of the job, such as Kueue's ``kueue.x-k8s.io/queue-name``.
        python: the interpreter in the image.

    Raises:
        ConfigError: the kind is none.
    """

    is_here = False
    sees_files = False

    def __init__(
        self,
        *,
        kind: Literal["TrainJob", "JobSet"] = "TrainJob",
        namespace: str | None = None,
        image: str | None = None,
        runtime: str = "torch-distributed",
        trainer_version: str = "2.2",
        code: str | None = None,
        runs_dir: str = "/opt/ml/runs",
        volumes: Mapping[str, str] | None = None,
        resources: Mapping[str, str] | None = None,
        gpu_resource: str = "nvidia.com/gpu",
        node_selector: Mapping[str, str] | None = None,
        service_account: str | None = None,
        labels: Mapping[str, str] | None = None,
        python: str = "python",
    ) -> None:
        if kind not in ("TrainJob", "JobSet"):
            raise ConfigError(f"kind is {kind!r}, but it must be TrainJob or JobSet.")
        self.kind = kind
        self.namespace = namespace
        self.runtime = runtime
        self._patches_runtime = _version(trainer_version) >= (2, 2)
        self._labels = dict(labels or {})
        self._pods: dict[str, Any] = {
            "image": image,
            "python": python,
            "is_packed": code is None,
            **({} if code is None else {"code": code}),
            "runs_dir": runs_dir,
            "volumes": dict(volumes or {}),
            "resources": dict(resources or {}),
            "gpu_resource": gpu_resource,
            "node_selector": dict(node_selector or {}),
            "service_account": service_account,
        }

    def manifest(self, spec: JobSpec) -> str:
        name = _name_in_cluster(spec)
        pods = Pods(**{**self._pods, "image": self._pods["image"] or spec.image})
        if pods.image is None and self.kind == "JobSet":
            raise ConfigError(
                "a JobSet needs the image of a container with Python, PyTorch and Shardwright in it: "
                'Kubernetes(kind="JobSet", image="registry/image:tag"), or Estimator(..., image_uri=...).'
            )
        for channel, path in spec.channels.items():
            if not PurePosixPath(path).is_absolute():
                raise ConfigError(
                    f"input {channel} is {path}, but on Kubernetes it must be a folder as pods see it, "
                    f"such as /data/{channel}, on a volume: "
                    'Kubernetes(volumes={"/data": "name-of-a-claim"}).'
                )
        if spec.import_folders:
            raise ConfigError(
                "dependencies stay on this machine. Copy them into source_dir, or install them in the image."
            )
        if unfit := [name for name in spec.environment if not is_env_name(name)]:
            raise ConfigError(
                f"environment has {unfit[0]!r}, but on Kubernetes names of variables are of letters, digits, "
                "'-', '_' and '.', and begin with no digit."
            )
        parts = pack(spec.source_dir, without=spec.runs_dir) if pods.is_packed else []
        common: dict[str, Any] = {
            "name": name,
            "namespace": self.namespace,
            "labels": self._labels,
            "num_parts": len(parts),
        }
        if self.kind == "JobSet":
            job = job_set(spec, pods, **common)
        else:
            job = train_job(spec, pods, **common, runtime=self.runtime, patches_runtime=self._patches_runtime)
        return to_yaml(
            [
                *([code_map(name, self.namespace, parts)] if parts else []),
                *([secret_object(name, self.namespace, new_secret())] if needs_secret(spec) else []),
                job,
            ]
        )

    def start(self, spec: JobSpec, *, waits: bool) -> NoReturn:
        """Refuses: manifests are printed, and kubectl applies them."""
        raise LaunchError(
            f"jobs on Kubernetes are started by kubectl, and fit() starts none. Print the manifests of job "
            f"{spec.name} in a script, print(estimator.manifest(inputs, job_name={spec.name!r})), and apply "
            "them: python script.py | kubectl apply -f -"
        )

    def __repr__(self) -> str:
        return f"Kubernetes(kind={self.kind!r}, namespace={self.namespace!r})"


def _version(text: str) -> tuple[int, int]:
    match = re.match(r"v?(\d+)\.(\d+)", str(text))
    if match is None:
        raise ConfigError(f"trainer_version is {text!r}, but it must be such as 2.2.")
    return int(match[1]), int(match[2])


def _name_in_cluster(spec: JobSpec) -> str:
    name = spec.name.lower()
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise ConfigError(
            f"the job is called {spec.name}, but on Kubernetes its name must begin with a letter, and have "
            f"at most {_LONGEST_NAME} letters, digits and '-'. Give another job_name or base_job_name."
        )
    return name
