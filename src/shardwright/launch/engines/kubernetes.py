"""Training jobs on Kubernetes through ``kubectl``, as a Kubeflow Trainer TrainJob or a JobSet.

The script's folder goes with the job (up to about 600 KiB, packed), unless the image has it. Data, and
results to keep, are on volumes.
"""

import json
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Literal

from shardwright.comm.trust.run_secret import new_secret
from shardwright.errors import ConfigError
from shardwright.files import replace_file
from shardwright.launch.engines.commands import run
from shardwright.launch.engines.job_folder import prepared_run_folder, still_runs
from shardwright.launch.engines.kubernetes_job import (
    KubernetesJob,
    code_resource,
    end_of,
    job_resource,
    name_in_cluster,
    secret_resource,
)
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
from shardwright.launch.engines.packed_code import pack
from shardwright.launch.jobs.job_spec import JobSpec
from shardwright.launch.jobs.running_job import RunningJob

__all__ = ["Kubernetes"]

_REMEDY = "Install kubectl and give it access to the cluster (kubectl cluster-info), or take another engine."
_DELETING_S = 100
_PLACEHOLDER = "made at the start of the job"


class Kubernetes:
    """Applies a manifest for each job, follows its pods' logs, and waits for its end.

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
        kubectl: the program.
        poll_s: how often the state is asked for, in seconds.

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
        kubectl: str = "kubectl",
        poll_s: float = 5.0,
    ) -> None:
        if kind not in ("TrainJob", "JobSet"):
            raise ConfigError(f"kind is {kind!r}, but it must be TrainJob or JobSet.")
        self.kind = kind
        self.namespace = namespace
        self.runtime = runtime
        self._patches_runtime = _version(trainer_version) >= (2, 2)
        self._labels = dict(labels or {})
        self._kubectl = [kubectl, *(("--namespace", namespace) if namespace else ())]
        self._poll_s = poll_s
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
        """The manifests, as YAML."""
        return to_yaml(self._documents(spec, secret=_PLACEHOLDER))

    def _documents(self, spec: JobSpec, *, secret: str) -> list[dict[str, Any]]:
        name = name_in_cluster(spec)
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
        return [
            *([code_map(name, self.namespace, parts)] if parts else []),
            *([secret_object(name, self.namespace, secret)] if needs_secret(spec) else []),
            job,
        ]

    def start(self, spec: JobSpec, *, waits: bool) -> RunningJob:
        """Writes the manifests into the job's folder, without the secret, and applies them with it."""
        documents = self._documents(spec, secret=new_secret())
        has_code = documents[0]["kind"] == "ConfigMap"
        manifest = to_yaml(documents)
        has_ended = self._has_ended_before(spec)
        path = spec.run_folder / "job.yaml"
        with prepared_run_folder(spec):
            for left in spec.logs.glob("pod-*.log"):
                left.unlink()
            replace_file(path, self.manifest(spec))  # others may read what is in the folder
            if has_ended:
                self._delete(spec, has_code=has_code)
            run([*self._kubectl, "apply", "--filename", "-"], remedy=_REMEDY, text=manifest)
        job = KubernetesJob(
            spec,
            self.kind,
            kubectl=self._kubectl,
            poll_s=self._poll_s,
            is_limited=self.kind == "JobSet" or self._patches_runtime,
        )
        job.own([code_resource(spec)] * has_code + [secret_resource(spec)] * needs_secret(spec))
        return job

    def _has_ended_before(self, spec: JobSpec) -> bool:
        """Whether the cluster has a job of this name, which has ended: applied once more it would not start.

        Raises:
            ConfigError: it has one that goes on.
            LaunchError: it does not answer.
        """
        resource = job_resource(self.kind, spec)
        words = [*self._kubectl, "get", resource, "--ignore-not-found", "--output", "json"]
        text = run(words, remedy=_REMEDY)
        if not text.strip():
            return False
        job = json.loads(text)
        if end_of(job) is None and not job["metadata"].get("deletionTimestamp"):
            raise still_runs(spec, f"kubectl delete {resource} stops it")
        return True

    def _delete(self, spec: JobSpec, *, has_code: bool) -> None:
        """Deletes a job that has ended, and returns when nothing of it is left."""
        # Its script by name: as something that the job owns it goes later, and might take the next one along.
        resources = [job_resource(self.kind, spec), *([code_resource(spec)] if has_code else [])]
        options = ["--ignore-not-found", "--cascade=foreground", "--wait", f"--timeout={_DELETING_S}s"]
        run([*self._kubectl, "delete", *resources, *options], remedy=_REMEDY)

    def __repr__(self) -> str:
        return f"Kubernetes(kind={self.kind!r}, namespace={self.namespace!r})"


def _version(text: str) -> tuple[int, int]:
    match = re.match(r"v?(\d+)\.(\d+)", str(text))
    if match is None:
        raise ConfigError(f"trainer_version is {text!r}, but it must be such as 2.2.")
    return int(match[1]), int(match[2])
