"""The driver of a job on Ray, and its workers: ``python -m shardwright.launch.engines.ray_driver task.json``.

The script is a process of its own, since Ray calls a worker's function in a thread. In a thread, a script can
neither catch signals nor make a process group beside Ray's.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from shardwright.comm.joining.run_secret import SECRET, new_secret
from shardwright.launch.processes import EXITS_VARIABLE, ExitLog, WorkerExit
from shardwright.launch.ranks.request import LaunchRequest, job_variables, result_folders
from shardwright.launch.ranks.verdict import WORKER_CRASHED, exit_code, failure_report
from shardwright.text import printable

_GRACE_S = 30.0


class Exits:
    """Collects how ranks ended, as an actor of Ray: workers of other hosts share no file with the driver."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._exits: list[dict[str, Any]] = []

    def secret(self) -> str:
        return self._secret

    def begin(self) -> None:
        """Forgets what ranks of an earlier attempt said."""
        self._exits.clear()

    def add(self, fields: dict[str, Any]) -> None:
        self._exits.append(fields)

    def all(self) -> list[dict[str, Any]]:
        """The ends of this attempt's ranks."""
        return self._exits


def train_on_worker(config: dict[str, Any]) -> None:
    context = ray.train.get_context()
    if context.get_world_rank() == 0:
        ray.get(config["exits"].begin.remote())
    meeting = _meeting_place(context.get_world_rank())
    os.chdir(config["source_dir"])
    request = LaunchRequest(
        target=config["entry_point"],
        arguments=tuple(config["arguments"]),
        num_ranks=context.get_local_world_size(),
        run_folder=Path(config["run_folder"]),
        grace_s=_GRACE_S,
        device=config["device"],
    )
    for path in (request.logs, *result_folders(request.run_folder).values()):
        path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="shardwright-rank-") as folder:
        log = ExitLog(Path(folder) / "exits.jsonl")
        words = [sys.executable, "-P", "-m", "shardwright.launch.ranks.worker"]
        words += ["--exits", f"{folder}/exits.jsonl", "--logs", str(request.logs), "--grace-s", str(_GRACE_S)]
        code = subprocess.run(
            [*words, "--", sys.executable, "-u", *request.script], env=_environ(config, request, meeting)
        ).returncode
        for worker_exit in log.read():
            clock_s = time.time() - time.monotonic()  # nodes have different monotonic clocks
            told = asdict(replace(worker_exit, at_s=worker_exit.at_s + clock_s))
            ray.get(config["exits"].add.remote(told))
    if code:
        raise RuntimeError(f"rank {context.get_world_rank()} ended with exit code {code}")


def _meeting_place(rank: int) -> tuple[str, int, int]:
    """Address and port where the ranks of the script are to meet, and the number of nodes."""
    port = 0
    if rank == 0:
        with socket.socket() as free:  # which nobody can connect to: it does not listen
            free.bind(("", 0))
            port = int(free.getsockname()[1])
    own = torch.tensor([port, ray.train.get_context().get_node_rank()])
    told = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(told, own)
    return os.environ["MASTER_ADDR"], int(told[0][0]), 1 + max(int(node) for _, node in told)


def _environ(config: dict[str, Any], request: LaunchRequest, meeting: tuple[str, int, int]) -> dict[str, str]:
    context = ray.train.get_context()
    address, port, num_nodes = meeting
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SM_")}
    environ |= config["environment"]
    environ |= {
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "GROUP_RANK": str(context.get_node_rank()),
        "GROUP_WORLD_SIZE": str(num_nodes),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        SECRET: ray.get(config["exits"].secret.remote()),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
    folders = [*config["import_folders"], *filter(None, [environ.get("PYTHONPATH")])]
    if folders:
        environ["PYTHONPATH"] = os.pathsep.join(folders)
    environ |= request.worker_environ(environ)
    num_gpus = request.num_ranks if request.device == "cpu" else torch.cuda.device_count()
    return {**environ, **job_variables(request, environ, num_gpus=num_gpus)}


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
    # Workers import what Ray pickles by name, which must not be __main__.
    from shardwright.launch.engines import ray_driver

    sys.exit(ray_driver.main(sys.argv[1]))
