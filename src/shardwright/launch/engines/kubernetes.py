"""Manifests of training jobs on Kubernetes, as a JobSet, which Kubeflow Trainer brings, too.

``python job.py | kubectl apply -f -`` starts a job whose script prints `Estimator.manifest`. The script's
folder goes with the job (up to about 600 KiB, packed), unless the image has it. Data, and results to keep,
are on volumes.

Fields are those of ``jobset.x-k8s.io/v1alpha2`` (JobSet 0.5 to 0.10).
"""

import base64
import io
import json
import os
import re
import shlex
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NoReturn

import yaml

from shardwright.comm.joining.run_secret import SECRET, has_secret, new_secret
from shardwright.errors import ConfigError, LaunchError
from shardwright.launch.engines.engine import ShellText, shell_line
from shardwright.launch.job_spec import JobSpec
from shardwright.launch.processes import refuse_half_characters
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
_ENV_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_CONTAINER = "node"
_PORT = 29500
_SECRET_KEY = "secret"


class Kubernetes:
    """Prints the manifests of a job.

    Args:
        kind: ``JobSet``; TrainJobs of Kubeflow are refused.
        namespace: of the cluster; None is that of kubectl's context.
        image: the container image; it has Python with Shardwright and PyTorch. None is the estimator's
            ``image_uri``.
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
        ConfigError: the kind is another one.
    """

    is_here = False
    sees_files = False

    def __init__(
        self,
        *,
        kind: Literal["JobSet"] = "JobSet",
        namespace: str | None = None,
        image: str | None = None,
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
        if kind != "JobSet":
            raise ConfigError(
                f"kind is {kind!r}, but it must be JobSet, which clusters with Kubeflow Trainer have, too. "
                "Leave kind out, and give an image."
            )
        self.namespace = namespace
        self._labels = dict(labels or {})
        self._image = image
        self._python = python
        self._is_packed = code is None
        self._code = code or "/opt/ml/code"
        self._runs_dir = runs_dir
        self._volumes = {
            path: (f"volume-{n}", claim) for n, (path, claim) in enumerate((volumes or {}).items())
        }
        self._resources = dict(resources or {})
        self._gpu_resource = gpu_resource
        self._node_selector = dict(node_selector or {})
        self._service_account = service_account

    def manifest(self, spec: JobSpec) -> str:
        name = _name_in_cluster(spec)
        if self._image is None and spec.image is None:
            raise ConfigError(
                "a JobSet needs the image of a container with Python, PyTorch and Shardwright in it: "
                'Kubernetes(image="registry/image:tag"), or Estimator(..., image_uri=...).'
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
        if unfit := [name for name in spec.environment if not _ENV_NAME.fullmatch(name)]:
            raise ConfigError(
                f"environment has {unfit[0]!r}, but on Kubernetes names of variables are of letters, digits, "
                "'-', '_' and '.', and begin with no digit."
            )
        parts = pack(spec.source_dir, without=spec.runs_dir) if self._is_packed else []
        documents = [self._job_set(spec, name, len(parts))]
        if _needs_secret(spec):
            secret = {"type": "Opaque", "stringData": {_SECRET_KEY: new_secret()}}
            documents.insert(0, {**self._object("v1", "Secret", f"{name}-secret"), **secret})
        if parts:
            data = {f"part-{number}": part for number, part in enumerate(parts)}
            documents.insert(0, {**self._object("v1", "ConfigMap", f"{name}-code"), "data": data})
        refuse_half_characters(json.dumps(documents, ensure_ascii=False))
        return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1_000_000)

    def start(self, spec: JobSpec, *, waits: bool) -> NoReturn:
        """Refuses: manifests are printed, and kubectl applies them."""
        raise LaunchError(
            f"jobs on Kubernetes are started by kubectl, and fit() starts none. Print the manifests of job "
            f"{spec.name} in a script, print(estimator.manifest(inputs, job_name={spec.name!r})), and apply "
            "them: python script.py | kubectl apply -f -"
        )

    def __repr__(self) -> str:
        return f"Kubernetes(namespace={self.namespace!r})"

    # ---- parts of manifests ----

    def _job_set(self, spec: JobSpec, name: str, num_parts: int) -> dict[str, Any]:
        """One indexed job, a pod a host, which find each other by name."""
        script = self._script(spec, num_parts, endpoint=f"{name}-{_CONTAINER}-0-0.{name}:{_PORT}")
        container: dict[str, Any] = {
            "name": _CONTAINER,
            "image": self._image or spec.image,
            "command": ["bash", "-c", _as_it_is(script)],
            "env": self._env(spec, name, num_parts),
            "ports": [{"containerPort": _PORT}],
            "volumeMounts": self._mounts(),
        }
        if resources := self._resources_of(spec):
            container["resources"] = resources
        job: dict[str, Any] = {
            "completionMode": "Indexed",
            "completions": spec.num_hosts,
            "parallelism": spec.num_hosts,
            "backoffLimit": 0,
        }
        if spec.max_run_s is not None:
            job["activeDeadlineSeconds"] = max(1, round(spec.max_run_s))
        pod = {"restartPolicy": "Never", **self._pod(), "containers": [container]}
        template = {"spec": {**job, "template": {"spec": pod}}}
        return {
            **self._object("jobset.x-k8s.io/v1alpha2", "JobSet", name, self._labels),
            "spec": {
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                "failurePolicy": {"maxRestarts": 0},
                "replicatedJobs": [{"name": _CONTAINER, "replicas": 1, "template": template}],
            },
        }

    def _script(self, spec: JobSpec, num_parts: int, *, endpoint: str) -> str:
        """Unpacks the user's script, and becomes its host's launcher."""
        words = spec.words_of_launcher(
            python=self._python,
            runs_dir=self._runs_dir,
            node_rank=ShellText('"$JOB_COMPLETION_INDEX"'),
            endpoint=ShellText(endpoint),
        )
        code = shlex.quote(self._code)
        names = [f"SHARDWRIGHT_CODE_{part}" for part in range(num_parts)]
        lines = ["set -e", *([f"mkdir -p {code}"] if names else []), f"cd {code}"]
        if names:
            parts = "".join(f"${{{name}}}" for name in names)
            lines += [f'printf %s "{parts}" | base64 -d | tar -xz', f"unset {' '.join(names)}"]
        return "\n".join([*lines, f"exec {shell_line(words)}", ""])

    def _env(self, spec: JobSpec, name: str, num_parts: int) -> list[dict[str, Any]]:
        variables = spec.variables(source_dir=self._code, run_folder=Path(self._runs_dir) / spec.name)
        variables["PYTHONUNBUFFERED"] = "1"
        env: list[dict[str, Any]] = [
            {"name": variable, "value": _as_it_is(value)}
            for variable, value in variables.items()
            if _ENV_NAME.fullmatch(variable)  # another, of a hyperparameter, the launcher sets
        ]
        for part in range(num_parts):
            source = {"configMapKeyRef": {"name": f"{name}-code", "key": f"part-{part}"}}
            env.append({"name": f"SHARDWRIGHT_CODE_{part}", "valueFrom": source})
        if _needs_secret(spec):
            source = {"secretKeyRef": {"name": f"{name}-secret", "key": _SECRET_KEY}}
            env.append({"name": SECRET, "valueFrom": source})
        return env

    def _pod(self) -> dict[str, Any]:
        """The parts of a pod besides its container."""
        # Loaders of data and ranks of one host exchange more than the usual 64 MiB.
        volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
        volumes += [
            {"name": name, "persistentVolumeClaim": {"claimName": claim}}
            for name, claim in self._volumes.values()
        ]
        found: dict[str, Any] = {"volumes": volumes}
        if self._node_selector:
            found["nodeSelector"] = dict(self._node_selector)
        if self._service_account is not None:
            found["serviceAccountName"] = self._service_account
        return found

    def _mounts(self) -> list[dict[str, str]]:
        named = [{"name": name, "mountPath": path} for path, (name, _) in self._volumes.items()]
        return [{"name": "shm", "mountPath": "/dev/shm"}, *named]

    def _resources_of(self, spec: JobSpec) -> dict[str, Any]:
        asked = dict(self._resources)
        if spec.gpus_per_host:
            asked[self._gpu_resource] = str(spec.gpus_per_host)
        return {"requests": asked, "limits": dict(asked)} if asked else {}

    def _object(
        self, version: str, kind: str, name: str, labels: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        metadata = {
            "name": name,
            **({"namespace": self.namespace} if self.namespace else {}),
            **({"labels": dict(labels)} if labels else {}),
        }
        return {"apiVersion": version, "kind": kind, "metadata": metadata}


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as such."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _as_it_is(text: str) -> str:
    """Text for commands and variables, where Kubernetes fills in ``$(NAME)``, and makes ``$`` of ``$$``."""
    return text.replace("$", "$$")


def _needs_secret(spec: JobSpec) -> bool:
    """Whether the job is given a secret; the launcher of a single host makes one itself."""
    return spec.num_hosts > 1 and not has_secret(spec.environment)


def _name_in_cluster(spec: JobSpec) -> str:
    name = spec.name.lower()
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise ConfigError(
            f"the job is called {spec.name}, but on Kubernetes its name must begin with a letter, and have "
            f"at most {_LONGEST_NAME} letters, digits and '-'. Give another job_name or base_job_name."
        )
    return name
