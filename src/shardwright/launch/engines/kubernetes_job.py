"""An applied Kubernetes training job: its state, pods and logs, through ``kubectl``."""

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.comm.absence.peer_loss import names_a_lost_peer
from shardwright.errors import ConfigError
from shardwright.exit_codes import ENVIRONMENT
from shardwright.launch.engines.commands import ask
from shardwright.launch.jobs.job_spec import JobSpec
from shardwright.launch.jobs.running_job import Outcome, RunningJob
from shardwright.launch.ranks.verdict import WORKER_CRASHED

__all__ = ["KubernetesJob", "code_resource", "end_of", "job_resource", "name_in_cluster", "secret_resource"]

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_NAME = 50
_SELECTOR = "jobset.sigs.k8s.io/jobset-name"
_REPORT = re.compile(r"^rank \d+ failed first", re.MULTILINE)
_MOST_REPORT_LINES = 60
_TERMINATED = 128 + 15
_MOST_FAILURES = 20
_DRAIN_S = 10.0


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
        super().__init__(spec, is_limited=is_limited, asks_every_s=poll_s)
        self._resource = job_resource(kind, spec)
        self._kubectl = list(kubectl)
        self._num_failures = 0
        self._state = ""
        self._end = ""
        self._pods: list[dict[str, Any]] = []
        self._followers: dict[str, subprocess.Popen[bytes]] = {}

    def own(self, resources: Sequence[str]) -> None:
        """Has resources deleted together with the job: its packed script, its secret."""
        job = self._get(self._resource) if resources else None
        if not job:
            return
        owner = {key: job[key] for key in ("apiVersion", "kind")}
        owner |= {key: job["metadata"][key] for key in ("name", "uid")}
        patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
        for resource in resources:
            ask([*self._kubectl, "patch", resource, "--type=merge", "--patch", patch])

    def _get(self, *what: str) -> dict[str, Any] | None:
        """An object; empty where there is none, None where the cluster does not answer."""
        text = ask([*self._kubectl, "get", *what, "--ignore-not-found", "--output", "json"])
        if text is None:
            return None
        found: dict[str, Any] = json.loads(text) if text.strip() else {}
        return found

    def _has_ended(self) -> bool:
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
        if (condition := end_of(job)) is not None:
            self._end = condition["type"]
            self.failure = condition.get("message", "")
        return bool(self._end)

    def _look_at_pods(self) -> None:
        found = self._get("pods", "--selector", f"{_SELECTOR}={name_in_cluster(self.spec)}")
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


def end_of(job: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The condition that says how a job has ended; None while it runs."""
    for condition in job.get("status", {}).get("conditions", []):
        if condition.get("status") == "True" and condition["type"] in ("Complete", "Completed", "Failed"):
            found: Mapping[str, Any] = condition
            return found
    return None


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
    """The last report of a pod's launcher on the rank that failed first."""
    text = log.read_text(errors="replace") if log.exists() else ""
    found = [match.start() for match in _REPORT.finditer(text)]
    return "\n".join(text[found[-1] :].splitlines()[:_MOST_REPORT_LINES]) if found else ""


def job_resource(kind: str, spec: JobSpec) -> str:
    """The name of the job in kubectl."""
    return f"{kind.lower()}/{name_in_cluster(spec)}"


def code_resource(spec: JobSpec) -> str:
    """The name of the job's packed script in kubectl."""
    return f"configmap/{name_in_cluster(spec)}-code"


def secret_resource(spec: JobSpec) -> str:
    """The name of the job's secret in kubectl."""
    return f"secret/{name_in_cluster(spec)}-secret"


def name_in_cluster(spec: JobSpec) -> str:
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
