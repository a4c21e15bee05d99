"""Runs torchelastic's agent, which starts, watches and restarts the ranks of this host."""

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardwright.comm.joining.run_secret import SECRET, has_secret, new_secret
from shardwright.errors import LaunchError
from shardwright.launch.processes import EXITS_VARIABLE, SAVED_AND_REQUEUE, ExitLog
from shardwright.launch.ranks.request import LaunchRequest, as_it_is, job_variables, result_folders
from shardwright.launch.ranks.standby import STANDBY
from shardwright.launch.ranks.verdict import WORKER_CRASHED, exit_code, failure_report, why_not_again
from shardwright.observe.run_folder import RunFolder
from shardwright.observe.run_record import saved_step
from shardwright.text import printable

try:
    import torch
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousConnectionError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from shardwright.launch.ranks.rendezvous import BACKEND, NotAgainError
except ImportError as error:
    raise LaunchError(
        f"Starting ranks needs PyTorch, which does not import: {error}. pip install 'shardwright[torch]'"
    ) from error

_HANGS_UP = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN  # nohup: it outlives its terminal
_SIGNALS = f"SIGTERM,SIGINT,{'SIGHUP,' if _HANGS_UP else ''}SIGQUIT,SIGUSR1"
_AGENT_MARGIN_S = 10


class _NoLogs(LogsSpecs):
    """Leaves the workers' output to the supervisors, which write the logs."""

    @property
    def root_log_dir(self) -> str:
        return os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for environ in envs.values():
            environ["TORCHELASTIC_ERROR_FILE"] = ""
        return LogsDest(
            stdouts=dict.fromkeys(envs, ""),
            stderrs=dict.fromkeys(envs, ""),
            error_files=dict.fromkeys(envs, os.devnull),
        )


def run(request: LaunchRequest, folder: Path, *, report: Callable[[str], None], verbose: bool) -> int:
    """Runs ranks to their end; returns the exit code of the launcher."""
    report = _wherever(report)
    if not verbose:
        _silence_torchelastic()
    with (
        _own_signal_handlers_restored(),
        _secret_of_run(request),
        _job_variables(request),
        contextlib.ExitStack() as stack,
    ):
        exits = ExitLog(folder / "exits.jsonl")
        stack.callback(_publish, exits, os.environ.pop(EXITS_VARIABLE, None))
        try:
            elastic_launch(_launch_config(request, exits, report), sys.executable)(
                *_worker_arguments(request, folder)
            )
        except ChildFailedError:
            pass  # the exit log knows better
        except NotAgainError as error:
            report(f"not started again: {error}")
        except (RendezvousClosedError, RendezvousConnectionError) as error:
            if not exits.of_last_life():  # it never started
                raise LaunchError(_not_started(request, error)) from error
            report("not started again: another host has ended the run")
        except SignalException as stopped:
            return _stopped(exits, stopped.sigval, request, report=report)
        except KeyboardInterrupt:
            return _stopped(exits, signal.SIGINT, request, report=report)
        except Exception as error:
            raise LaunchError(_not_started(request, error)) from error
        ended = exits.of_last_life()
        if any(worker_exit.exit_code for worker_exit in ended):
            report(failure_report(ended))
        return exit_code(ended) if ended else WORKER_CRASHED


@contextlib.contextmanager
def _secret_of_run(request: LaunchRequest) -> Iterator[None]:
    """Sets a secret for the ranks, unless there is one; the launchers of several hosts would each make "
    "another."""
    if request.num_nodes > 1 or has_secret(os.environ):
        yield
        return
    os.environ[SECRET] = new_secret()
    try:
        yield
    finally:
        os.environ.pop(SECRET, None)


@contextlib.contextmanager
def _job_variables(request: LaunchRequest) -> Iterator[None]:
    """Sets what scripts written for SageMaker read, and makes the folders that it names, while ranks run."""
    num_gpus = request.num_ranks if request.device == "cpu" else torch.cuda.device_count()
    chosen = job_variables(request, os.environ, num_gpus=num_gpus)
    results = result_folders(request.run_folder.absolute())
    folders = [path for name, path in results.items() if {**chosen, **os.environ}[name] == str(path)]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name in chosen:
            os.environ.pop(name, None)  # another run in this process has others
        for folder in sorted(folders, reverse=True) if request.num_nodes == 1 else ():
            with contextlib.suppress(OSError):  # it has something in it
                folder.rmdir()


def _wherever(report: Callable[[str], None]) -> Callable[[str], None]:
    """Reports, also to a terminal that has gone: the exit code says the same."""

    def told(text: str) -> None:
        with contextlib.suppress(OSError):
            report(text)

    return told


def _publish(exits: ExitLog, path: str | None) -> None:
    """Leaves how the ranks of this host ended where whoever started several hosts looks for it."""
    if path is None:
        return
    published = ExitLog(path)
    clock_s = time.time() - time.monotonic()  # hosts have different monotonic clocks
    for worker_exit in exits.of_last_life():
        published.append(dataclasses.replace(worker_exit, at_s=worker_exit.at_s + clock_s))


def _silence_torchelastic() -> None:
    """It would report each failure again, in its own way. Each of its loggers has a level of its own."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _worker_arguments(request: LaunchRequest, folder: Path) -> list[str]:
    supervisor = ["-P", "-m", "shardwright.launch.ranks.worker", "--exits", f"{folder}/exits.jsonl"]
    limits = ["--logs", str(request.logs.absolute()), "--grace-s", str(request.grace_s)]
    standby = ["--standby", str(folder)] if (folder / STANDBY).exists() else []
    goes_on = ["--goes-on"] if request.min_nodes else []
    return as_it_is([*supervisor, *limits, *standby, *goes_on, "--", sys.executable, "-u", *request.script])


def _why_not_again(exits: ExitLog) -> str:
    """Why the ranks of this host are not to start again; empty at the first start."""
    ended = exits.of_last_life()
    life = max((each.life for each in ended), default=0)
    return why_not_again(exits.of_life(life - 1), ended)


def _launch_config(request: LaunchRequest, exits: ExitLog, report: Callable[[str], None]) -> LaunchConfig:
    # Hosts that have numbers meet at the first one; hosts without get them in the order in which they come.
    is_static = request.num_nodes > 1 and request.node_rank is not None
    options: dict[str, Any] = {
        "min_nodes": request.min_nodes or request.num_nodes,
        "max_nodes": request.num_nodes,
        "nproc_per_node": request.num_ranks,
        "run_id": "shardwright" if request.num_nodes > 1 else uuid.uuid4().hex,
        "role": "worker",
        "rdzv_backend": BACKEND,
        "rdzv_endpoint": request.endpoint or "localhost:0",
        "rdzv_configs": {
            "say": report,
            "why_not_again": lambda: _why_not_again(exits),
            **({"rank": request.node_rank} if is_static else {}),
            # A host that has gone is not waited for longer than this.
            **({"keep_alive_interval": 2, "last_call_timeout": 10} if request.min_nodes else {}),
        },
        "max_restarts": request.max_restarts,
        "logs_specs": _NoLogs(),
        # One host needs no name for itself, and its name need not resolve.
        "local_addr": "127.0.0.1" if request.num_nodes == 1 else None,
        "signals_to_handle": _SIGNALS,
        "shutdown_timeout": round(request.grace_s) + _AGENT_MARGIN_S,
    }
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    # PyTorch before 2.13 may lack these; then SIGUSR1 does not reach the ranks, and a grace over 30 s is cut.
    for name in {"signals_to_handle", "shutdown_timeout"} - known:
        del options[name]
    return LaunchConfig(**options)


@contextlib.contextmanager
def _own_signal_handlers_restored() -> Iterator[None]:
    """The agent leaves its handlers behind."""
    numbers = [getattr(signal, name) for name in _SIGNALS.split(",")]
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stopped(
    exits: ExitLog, number: signal.Signals, request: LaunchRequest, *, report: Callable[[str], None]
) -> int:
    codes = [worker_exit.exit_code for worker_exit in exits.of_last_life()]
    if SAVED_AND_REQUEUE in codes:
        report(f"stopped by {number.name}; the ranks saved their state (exit code 75)")
        return SAVED_AND_REQUEUE
    step = max((worker_exit.steps or 0 for worker_exit in exits.of_last_life()), default=0)
    saved = saved_step(RunFolder(request.run_folder))
    if step and saved and saved.step == step and {0, -number, 128 + number, -signal.SIGKILL} >= {*codes}:
        report(f"stopped by {number.name} after step {step}, which is saved (exit code 75)")
        return SAVED_AND_REQUEUE
    if len(codes) == request.num_ranks and not any(codes):
        report(f"stopped by {number.name}; the script ended by itself, with exit code 0")
        return 128 + number
    killed = [  # not those that a second signal ended
        worker_exit.rank
        for worker_exit in exits.of_last_life()
        if worker_exit.was_killed and worker_exit.patience_s >= request.grace_s
    ]
    ranks, were = ", ".join(map(str, sorted(killed))), "were" if killed[1:] else "was"
    plural = "s" * (len(killed) > 1)
    unsaved = f"; rank{plural} {ranks} did not save in time (--grace {request.grace_s:g}), and {were} killed"
    nothing = "; the state of this moment was not saved (sw.Checkpoints in the script saves it)"
    report(f"stopped by {number.name}{unsaved if killed else nothing}")
    return 128 + number


def _not_started(request: LaunchRequest, error: BaseException) -> str:
    while error.__cause__ is not None:  # torchelastic says: see inner exception for details
        error = error.__cause__
    first_line = str(error).partition("\n")[0]  # PyTorch adds the stack of its C++
    where = (
        f"with {request.num_nodes} nodes at {request.endpoint}" if request.num_nodes > 1 else "on this host"
    )
    return (
        f"{request.num_ranks} ranks {where} could not be started: {type(error).__name__}: "
        f"{printable(first_line).rstrip('.')}. "
        "shardwright run -v shows what torchelastic did."
    )
