"""Training jobs on a Ray cluster, as workers of Ray Train's TorchTrainer.

::

    fit ──► driver ──► TorchTrainer ──► a worker for each rank ──► its supervisor ──► script
         ray_driver.py                  (in it, too)

The driver, a process of its own, imports Ray. The folders of the job and of the script must have the same
paths on all nodes.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.errors import LaunchError
from shardwright.files import replace_file
from shardwright.launch.engines.engine import HostCommand, ProcessesJob, launcher_log, prepared_run_folder
from shardwright.launch.job_spec import JobSpec, own_environ
from shardwright.launch.running_job import RunningJob


class Ray:
    """Runs jobs with ``ray[train]``: ``pip install 'shardwright[ray]'``.

    Args:
        address: of the cluster; None is the one that ``RAY_ADDRESS`` names, or else a cluster of this machine
            that lasts as long as the job.
        resources_per_worker: that each rank takes, such as ``{"CPU": 4}``; its GPU is added.
        runtime_env: of Ray, for what its nodes lack.
        placement_strategy: of Ray: ``PACK``, ``SPREAD``, ``STRICT_PACK``, ``STRICT_SPREAD``.
    """

    is_here = False
    sees_files = True

    def __init__(
        self,
        address: str | None = None,
        *,
        resources_per_worker: Mapping[str, float] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        placement_strategy: str = "PACK",
    ) -> None:
        self.address = address
        self._resources = dict(resources_per_worker or {"CPU": 1})
        self._runtime_env = dict(runtime_env or {})
        self._placement_strategy = placement_strategy

    def manifest(self, spec: JobSpec) -> str:
        return json.dumps(self._task(spec), indent=2)

    def _task(self, spec: JobSpec) -> dict[str, Any]:
        return {
            "address": self.address,
            "runtime_env": self._runtime_env,
            "scaling_config": {
                "num_workers": spec.num_ranks,
                "use_gpu": spec.gpus_per_host > 0,
                "resources_per_worker": self._resources | ({"GPU": 1} if spec.gpus_per_host else {}),
                "placement_strategy": self._placement_strategy,
            },
            "max_failures": spec.max_restarts,
            "train_loop_config": {
                "entry_point": spec.entry_point,
                "arguments": list(spec.words),
                "source_dir": str(spec.source_dir),
                "run_folder": str(spec.run_folder),
                "device": spec.device,
                "import_folders": list(spec.import_folders),
                "environment": spec.variables(),
            },
        }

    def start(self, spec: JobSpec, *, waits: bool) -> RunningJob:
        if importlib.util.find_spec("ray") is None:
            raise LaunchError(
                "there is no Ray in this Python's environment. Install it: pip install 'shardwright[ray]'"
            )
        manifest = self.manifest(spec)
        task = spec.run_folder / "job.ray.json"
        environ = own_environ(spec, os.environ)
        # Nobody is told of a run, and what ranks print is not folded.
        environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0"}
        # A busy machine takes longer to start workers, each of which imports PyTorch, than Ray waits.
        environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "300")
        if self.address is None and not environ.get("RAY_ADDRESS"):
            # Each takes a process, and a cluster of this machine has no use for it.
            environ |= {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0", "RAY_TRAIN_METRICS_ENABLED": "0"}
        words = [sys.executable, "-P", "-u", "-m", "shardwright.launch.engines.ray_driver", str(task)]
        with prepared_run_folder(spec) as lock:
            replace_file(task, manifest)
            return _RayJob(spec, [HostCommand(words, environ)], ends_with_parent=waits, lock=lock)

    def __repr__(self) -> str:
        return f"Ray(address={self.address!r})"


class _RayJob(ProcessesJob):
    def _log_files(self) -> list[Path]:
        return [launcher_log(self.spec, 0)]

    def _show(self, text: str) -> None:
        # Every two seconds, where Ray has no dashboard: "Failed to query Ray Train Controller actor state."
        lines = text.splitlines(keepends=True)
        super()._show("".join(line for line in lines if "(PlacementGroupCleaner pid=" not in line))
