"""The driver of a training job on Ray: ``python -m shardwright.launch.engines.ray_driver task.json``."""

import contextlib
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from shardwright.comm.joining.run_secret import new_secret
from shardwright.launch.engines.ray_worker import Exits, train_on_worker
from shardwright.launch.processes.exits import EXITS_VARIABLE, ExitLog, WorkerExit
from shardwright.launch.ranks.verdict import WORKER_CRASHED, exit_code, failure_report
from shardwright.printable import printable

__all__ = ["main"]


def main(path: str) -> int:
    """Runs the job that a file describes; returns its exit code."""
    task = json.loads(Path(path).read_text())
    published = ExitLog(os.environ.pop(EXITS_VARIABLE))
    _connect(task)
    signal.signal(signal.SIGTERM, _interrupt)
    exits = ray.remote(num_cpus=0)(Exits).remote(new_secret())
    error: Exception | None = None
    try:
        _trainer(task, exits).fit()
    except KeyboardInterrupt:
        return 128 + signal.SIGTERM
    except Exception as caught:
        error = caught
    finally:
        ended = [WorkerExit(**fields) for fields in _told(exits)]
        ray.shutdown()
    for worker_exit in ended:
        published.append(worker_exit)
    if any(worker_exit.exit_code for worker_exit in ended):
        sys.stderr.write(f"{printable(failure_report(ended), lines=True)}\n")
        return exit_code(ended)
    if error is not None:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return WORKER_CRASHED
    return 0


def _connect(task: dict[str, Any]) -> None:
    number = task["scaling_config"]["num_workers"]
    own = task["address"] is None and not os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {}
    if own:
        # Ray counts cores; ranks that share one would wait for each other for ever.
        needed = number * task["scaling_config"]["resources_per_worker"].get("CPU", 1)
        options = {"num_cpus": max(os.cpu_count() or 1, int(needed)), "include_dashboard": False}
    ray.init(
        address="local" if own else task["address"],
        runtime_env=task["runtime_env"] or None,
        logging_level=logging.WARNING,
        **options,
    )


def _trainer(task: dict[str, Any], exits: Any) -> TorchTrainer:
    config = task["train_loop_config"]
    return TorchTrainer(
        train_on_worker,
        train_loop_config={**config, "exits": exits},
        # Ranks make their own process groups; this one is for the workers to agree on a place where to meet.
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(**task["scaling_config"]),
        run_config=RunConfig(
            name="ray",
            storage_path=config["run_folder"],
            failure_config=FailureConfig(max_failures=task["max_failures"]),
        ),
    )


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _told(exits: Any) -> list[dict[str, Any]]:
    with contextlib.suppress(Exception):  # the cluster has gone
        found: list[dict[str, Any]] = ray.get(exits.all.remote(), timeout=10)
        return found
    return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
