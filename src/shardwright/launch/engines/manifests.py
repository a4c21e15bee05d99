"""Kubernetes manifests of training jobs: Kubeflow's TrainJob, and JobSet.

Fields are those of ``trainer.kubeflow.org/v1alpha1`` (Kubeflow Trainer 2.0 to 2.3) and
``jobset.x-k8s.io/v1alpha2`` (JobSet 0.5 to 0.10).
"""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from shardwright.comm.joining.run_secret import SECRET, has_secret
from shardwright.launch.engines.engine import ShellText, shell_line
from shardwright.launch.job_spec import JobSpec
from shardwright.launch.process_text import refuse_half_characters

REPLICATED_JOB = "node"
"""The name of the jobs, and of their container, in Kubeflow's runtimes."""

_PORT = 29500
_SECRET_KEY = "secret"
_ENV_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """The pods of a job, whichever kind of job makes them.

    Attributes:
        image: of the container; None leaves it to the runtime.
        code: the folder of the script in it.
        runs_dir: the folder there that holds the run folders.
        gpu_resource: what GPUs are called in the cluster.
        volumes: names of claims, by the folders at which they are mounted.
    """

    image: str | None = None
    python: str = "python"
    code: str = "/opt/ml/code"
    runs_dir: str = "/opt/ml/runs"
    is_packed: bool = True
    gpu_resource: str = "nvidia.com/gpu"
    resources: Mapping[str, str] = field(default_factory=dict)
    volumes: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    service_account: str | None = None

    def pod_spec(self) -> dict[str, Any]:
        """The parts of a pod besides its container."""
        claims = {
            name: {"persistentVolumeClaim": {"claimName": claim}} for name, claim in self._claims().items()
        }
        found: dict[str, Any] = {
            # Loaders of data and ranks of one host exchange more than the usual 64 MiB.
            "volumes": [
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
                *({"name": name, **claim} for name, claim in claims.items()),
            ]
        }
        if self.node_selector:
            found["nodeSelector"] = dict(self.node_selector)
        if self.service_account is not None:
            found["serviceAccountName"] = self.service_account
        return found

    def mounts(self) -> list[dict[str, str]]:
        names = dict(zip(self.volumes, self._claims(), strict=True))
        return [
            {"name": "shm", "mountPath": "/dev/shm"},
            *({"name": names[path], "mountPath": path} for path in self.volumes),
        ]

    def _claims(self) -> dict[str, str]:
        return {f"volume-{number}": claim for number, claim in enumerate(self.volumes.values())}

    def resources_of(self, spec: JobSpec) -> dict[str, Any]:
        asked = dict(self.resources)
        if spec.gpus_per_host:
            asked[self.gpu_resource] = str(spec.gpus_per_host)
        return {"requests": asked, "limits": dict(asked)} if asked else {}


def shell_script(spec: JobSpec, pods: Pods, *, num_parts: int, node_rank: str, endpoint: str) -> str:
    """The script of a container: unpacks the user's script, and becomes its host's launcher."""
    words = spec.words_of_launcher(
        python=pods.python,
        runs_dir=pods.runs_dir,
        node_rank=ShellText(node_rank),
        endpoint=ShellText(endpoint),
    )
    lines = ["set -e"]
    if num_parts:
        parts = "".join(f"${{SHARDWRIGHT_CODE_{part}}}" for part in range(num_parts))
        names = " ".join(f"SHARDWRIGHT_CODE_{part}" for part in range(num_parts))
        lines += [
            f"mkdir -p {shlex.quote(pods.code)}",
            f"cd {shlex.quote(pods.code)}",
            f'printf %s "{parts}" | base64 -d | tar -xz',
            f"unset {names}",
        ]
    else:
        lines.append(f"cd {shlex.quote(pods.code)}")
    return "\n".join([*lines, f"exec {shell_line(words)}", ""])


def code_map(name: str, namespace: str | None, parts: list[str]) -> dict[str, Any]:
    """The ConfigMap that has the packed script in it."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(f"{name}-code", namespace, {}),
        "data": {f"part-{number}": part for number, part in enumerate(parts)},
    }


def secret_object(name: str, namespace: str | None, secret: str) -> dict[str, Any]:
    """The Secret by which ranks of several hosts know each other."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(f"{name}-secret", namespace, {}),
        "type": "Opaque",
        "stringData": {_SECRET_KEY: secret},
    }


def train_job(
    spec: JobSpec,
    pods: Pods,
    *,
    name: str,
    namespace: str | None,
    runtime: str,
    labels: Mapping[str, str],
    num_parts: int,
    patches_runtime: bool,
) -> dict[str, Any]:
    rank, endpoint = '"$PET_NODE_RANK"', '"$PET_MASTER_ADDR:$PET_MASTER_PORT"'
    script = shell_script(spec, pods, num_parts=num_parts, node_rank=rank, endpoint=endpoint)
    trainer: dict[str, Any] = {
        **({"image": pods.image} if pods.image else {}),
        "command": ["bash", "-c", _as_it_is(script)],
        "env": _env(spec, pods, name, num_parts),
        "numNodes": spec.num_hosts,
        "numProcPerNode": spec.processes_per_host,
    }
    if resources := pods.resources_of(spec):
        trainer["resourcesPerNode"] = resources
    pod = {**pods.pod_spec(), "containers": [{"name": REPLICATED_JOB, "volumeMounts": pods.mounts()}]}
    content: dict[str, Any] = {"runtimeRef": {"name": runtime}, "trainer": trainer}
    if patches_runtime:
        job = {"name": REPLICATED_JOB, "template": {"spec": {"template": {"spec": pod}}}}
        patch = {"template": {"spec": {"replicatedJobs": [job]}}}
        content["runtimePatches"] = [{"manager": "shardwright", "trainingRuntimeSpec": patch}]
        if spec.max_run_s is not None:
            content["activeDeadlineSeconds"] = max(1, round(spec.max_run_s))
    else:
        content["podTemplateOverrides"] = [{"targetJobs": [{"name": REPLICATED_JOB}], "spec": pod}]
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(name, namespace, labels),
        "spec": content,
    }


def job_set(
    spec: JobSpec,
    pods: Pods,
    *,
    name: str,
    namespace: str | None,
    labels: Mapping[str, str],
    num_parts: int,
) -> dict[str, Any]:
    """A JobSet: one indexed job, a pod a host, which find each other by name."""
    first = f"{name}-{REPLICATED_JOB}-0-0.{name}"
    rank, endpoint = '"$JOB_COMPLETION_INDEX"', f"{first}:{_PORT}"
    script = shell_script(spec, pods, num_parts=num_parts, node_rank=rank, endpoint=endpoint)
    container: dict[str, Any] = {
        "name": REPLICATED_JOB,
        "image": pods.image,
        "command": ["bash", "-c", _as_it_is(script)],
        "env": _env(spec, pods, name, num_parts),
        "ports": [{"containerPort": _PORT}],
        "volumeMounts": pods.mounts(),
    }
    if resources := pods.resources_of(spec):
        container["resources"] = resources
    job: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": spec.num_hosts,
        "parallelism": spec.num_hosts,
        "backoffLimit": 0,
    }
    if spec.max_run_s is not None:
        job["activeDeadlineSeconds"] = max(1, round(spec.max_run_s))
    pod = {"restartPolicy": "Never", **pods.pod_spec(), "containers": [container]}
    replicated = {
        "name": REPLICATED_JOB,
        "replicas": 1,
        "template": {"spec": {**job, "template": {"spec": pod}}},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(name, namespace, labels),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [replicated],
        },
    }


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as such."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def to_yaml(documents: list[dict[str, Any]]) -> str:
    refuse_half_characters(json.dumps(documents, ensure_ascii=False))
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1_000_000)


def is_env_name(name: str) -> bool:
    return _ENV_NAME.fullmatch(name) is not None


def _as_it_is(text: str) -> str:
    """Text for commands and variables, where Kubernetes fills in ``$(NAME)``, and makes ``$`` of ``$$``."""
    return text.replace("$", "$$")


def _metadata(name: str, namespace: str | None, labels: Mapping[str, str]) -> dict[str, Any]:
    return {
        "name": name,
        **({"namespace": namespace} if namespace else {}),
        **({"labels": dict(labels)} if labels else {}),
    }


def _env(spec: JobSpec, pods: Pods, name: str, num_parts: int) -> list[dict[str, Any]]:
    variables = spec.variables(source_dir=pods.code, run_folder=Path(pods.runs_dir) / spec.name)
    variables["PYTHONUNBUFFERED"] = "1"
    return [
        *(
            {"name": variable, "value": _as_it_is(value)}
            for variable, value in variables.items()
            if is_env_name(variable)  # another, of a hyperparameter, the launcher sets
        ),
        *(
            {
                "name": f"SHARDWRIGHT_CODE_{part}",
                "valueFrom": {"configMapKeyRef": {"name": f"{name}-code", "key": f"part-{part}"}},
            }
            for part in range(num_parts)
        ),
        *([_secret_variable(name)] if needs_secret(spec) else []),
    ]


def _secret_variable(name: str) -> dict[str, Any]:
    return {"name": SECRET, "valueFrom": {"secretKeyRef": {"name": f"{name}-secret", "key": _SECRET_KEY}}}


def needs_secret(spec: JobSpec) -> bool:
    """Whether the job is given a secret; the launcher of a single host makes one itself."""
    return spec.num_hosts > 1 and not has_secret(spec.environment)
