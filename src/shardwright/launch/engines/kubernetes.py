"""Training jobs on Kubernetes, as a TrainJob of Kubeflow's Trainer or as a JobSet, through ``kubectl``.

What is in the folder of the script goes with the job (up to about 600 KiB, packed), unless it is in the
image. Data, and results that are to stay, are on volumes.
"""

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from shardwright.comm.peer_loss import names_a_lost_peer
from shardwright.errors import ConfigError
from shardwright.exit_codes import ENVIRONMENT
from shardwright.launch.engines.commands import ask, run
from shardwright.launch.engines.manifests import Pods, code_map, job_set, to_yaml, train_job
from shardwright.launch.engines.packed_code import pack
from shardwright.launch.engines.processes import prepare_run_folder
from shardwright.launch.job_spec import JobSpec
from shardwright.launch.running_job import Outcome, RunningJob
from shardwright.launch.verdict import WORKER_CRASHED

__all__ = ["Kubernetes"]

_REMEDY = "Install kubectl and give it access to the cluster (kubectl cluster-info), or take another engine."
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_NAME = 50
_SELECTOR = "jobset.sigs.k8s.io/jobset-name"
_REPORT = re.compile(r"^rank \d+ failed first", re.MULTILINE)
_MOST_REPORT_LINES = 60
_TERMINATED = 128 + 15
_MOST_FAILURES = 20
_DRAIN_S = 10.0


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
        return to_yaml(self._documents(spec))

    def _documents(self, spec: JobSpec) -> list[dict[str, Any]]:
        name = _name(spec)
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
        return [*([code_map(name, self.namespace, parts)] if parts else []), job]

    def start(self, spec: JobSpec, *, waits: bool) -> RunningJob:
        """Writes the manifests into the job's folder, and applies them."""
        documents = self._documents(spec)
        prepare_run_folder(spec)
        for left in spec.logs.glob("pod-*.log"):
            left.unlink()
        path = spec.run_folder / "job.yaml"
        path.write_text(to_yaml(documents))
        run([*self._kubectl, "apply", "--filename", str(path)], remedy=_REMEDY)
        job = KubernetesJob(
            spec,
            self.kind,
            kubectl=self._kubectl,
            poll_s=self._poll_s,
            is_limited=self.kind == "JobSet" or self._patches_runtime,
        )
        if len(documents) > 1:
            job.own_code()
        return job

    def __repr__(self) -> str:
        return f"Kubernetes(kind={self.kind!r}, namespace={self.namespace!r})"


class KubernetesJob(RunningJob):
    """A job that was applied.

    Args:
        spec: what it is.
        kind: of its manifest.
        kubectl: the program and its first words.
        poll_s: how often its state is asked for.
        is_limited: the cluster ends it after its `max_run_s`.
    """

    def __init__(
        self, spec: JobSpec, kind: str, *, kubectl: Sequence[str], poll_s: float, is_limited: bool
    ) -> None:
        super().__init__(spec, is_limited=is_limited)
        self._resource = f"{kind.lower()}/{_name(spec)}"
        self._kubectl = list(kubectl)
        self._asks_every_s = poll_s
        self._asks_next_s = 0.0
        self._num_failures = 0
        self._state = ""
        self._end = ""
        self._pods: list[dict[str, Any]] = []
        self._followers: dict[str, subprocess.Popen[bytes]] = {}

    def own_code(self) -> None:
        """Has the packed script deleted together with the job."""
        job = self._get(self._resource)
        if not job:
            return
        owner = {key: job[key] for key in ("apiVersion", "kind")}
        owner |= {key: job["metadata"][key] for key in ("name", "uid")}
        patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
        ask([*self._kubectl, "patch", f"configmap/{_name(self.spec)}-code", "--type=merge", "--patch", patch])

    def _get(self, *what: str) -> dict[str, Any] | None:
        """An object; empty where there is none, None where the cluster does not answer."""
        text = ask([*self._kubectl, "get", *what, "--ignore-not-found", "--output", "json"])
        if text is None:
            return None
        found: dict[str, Any] = json.loads(text) if text.strip() else {}
        return found

    def _has_ended(self) -> bool:
        if time.monotonic() < self._asks_next_s:
            return False
        self._asks_next_s = time.monotonic() + self._asks_every_s
        job = self._get(self._resource)
        if job is None:
            self._num_failures += 1
            if self._num_failures >= _MOST_FAILURES:
                self._end = "Unknown"
            return bool(self._end)
        self._num_failures = 0
        if not job:
            self._end = "Deleted"
            return True
        self._look_at_pods()
        for condition in job.get("status", {}).get("conditions", []):
            if condition.get("status") == "True" and condition["type"] in ("Complete", "Completed", "Failed"):
                self._end = condition["type"]
                self.failure = condition.get("message", "")
        return bool(self._end)

    def _look_at_pods(self) -> None:
        found = self._get("pods", "--selector", f"{_SELECTOR}={_name(self.spec)}")
        self._pods = found.get("items", []) if found else self._pods
        state = ", ".join(sorted(f"{pod['metadata']['name']} {_phase(pod)}" for pod in self._pods))
        if state != self._state:
            self._state = state
            self._note(f"{self._resource}: {state or 'no pods yet'}")
        for pod in self._pods:
            name = pod["metadata"]["name"]
            if name not in self._followers and pod.get("status", {}).get("phase", "Pending") != "Pending":
                with self._log_of(name).open("wb") as log:
                    self._followers[name] = subprocess.Popen(
                        [*self._kubectl, "logs", "--follow", name],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )

    def _ask_to_stop(self) -> None:
        ask([*self._kubectl, "delete", self._resource, "--wait=false"])
        self._asks_next_s = 0.0

    def _outcome(self) -> Outcome:
        deadline_s = time.monotonic() + _DRAIN_S
        for follower in self._followers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                follower.wait(max(0.0, deadline_s - time.monotonic()))
        if self._end in ("Complete", "Completed"):
            return 0, ""
        if self._end == "Unknown":
            return ENVIRONMENT, f"kubectl could not tell of {self._resource} {_MOST_FAILURES} times in a row."
        if self._end == "Deleted":
            return _TERMINATED, f"{self._resource} was deleted."
        return self._first_failure()

    def _first_failure(self) -> Outcome:
        """The pod that failed first, and what its launcher said."""
        failed = []
        for pod in self._pods:
            for container in pod.get("status", {}).get("containerStatuses", []):
                ended = container.get("state", {}).get("terminated") or {}
                if ended.get("exitCode"):
                    report = _report(self._log_of(pod["metadata"]["name"]))
                    order = (names_a_lost_peer(report), not report, ended.get("finishedAt", ""))
                    failed.append((order, pod["metadata"]["name"], ended, report))
        message = f"{self._resource} failed: {self.failure or 'it does not say why'}"
        if not failed:
            return WORKER_CRASHED, f"{message}\nkubectl describe {self._resource} tells more."
        _, name, ended, report = min(failed, key=lambda entry: entry[0])
        reason = f", {ended['reason']}" if ended.get("reason") not in (None, "Error") else ""
        return int(ended["exitCode"]), (
            f"{message}\npod {name} ended with exit code {ended['exitCode']}{reason}.\n{report}"
        )

    def _log_of(self, pod: str) -> Path:
        return self.spec.logs / f"pod-{pod}.log"

    def _log_files(self) -> Sequence[Path]:
        return [self._log_of(name) for name in self._followers]

    def _close(self) -> None:
        for follower in self._followers.values():
            follower.kill()
            follower.wait()


def _phase(pod: Mapping[str, Any]) -> str:
    """The phase of a pod, with the reason for which it waits."""
    status = pod.get("status", {})
    reasons = [
        container["state"]["waiting"].get("reason", "")
        for container in status.get("containerStatuses", [])
        if container.get("state", {}).get("waiting")
    ]
    reasons += [
        condition.get("reason", "")
        for condition in status.get("conditions", [])
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False"
    ]
    reason = f" ({reasons[0]})" if reasons and reasons[0] else ""
    return f"{status.get('phase', 'Pending')}{reason}"


def _report(log: Path) -> str:
    """What the launcher of a pod said at its end of the rank that failed first."""
    text = log.read_text(errors="replace") if log.exists() else ""
    found = [match.start() for match in _REPORT.finditer(text)]
    return "\n".join(text[found[-1] :].splitlines()[:_MOST_REPORT_LINES]) if found else ""


def _name(spec: JobSpec) -> str:
    """The name of the job in the cluster.

    Raises:
        ConfigError: the cluster would not take it.
    """
    name = spec.name.lower()
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise ConfigError(
            f"the job is called {spec.name}, but on Kubernetes its name must begin with a letter, and have "
            f"at most {_LONGEST_NAME} letters, digits and '-'. Give another job_name or base_job_name."
        )
    return name


def _version(text: str) -> tuple[int, int]:
    match = re.match(r"v?(\d+)\.(\d+)", str(text))
    if match is None:
        raise ConfigError(f"trainer_version is {text!r}, but it must be such as 2.2.")
    return int(match[1]), int(match[2])
