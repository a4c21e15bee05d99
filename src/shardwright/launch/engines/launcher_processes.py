"""A training job of processes on this machine: one launcher per host."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.errors import LaunchError
from shardwright.launch.jobs.job_spec import JobSpec
from shardwright.launch.jobs.running_job import Outcome, RunningJob, exits_file, outcome_of_exits
from shardwright.launch.processes.exits import EXITS_VARIABLE, SAVED_AND_REQUEUE
from shardwright.launch.processes.processes import die_with_parent, kill_group

__all__ = ["HostCommand", "ProcessesJob", "launcher_log"]

_NOTICE_S = 5.0
"""Hosts whose peer has failed get so long to notice it and to say so, and as long again to end."""

_END_S = 45.0
"""Launchers that were told to end give their ranks 30 s, and need some themselves."""


@dataclass(frozen=True, slots=True)
class HostCommand:
    """The command of one host."""

    words: Sequence[str]
    environ: Mapping[str, str]


def launcher_log(spec: JobSpec, host: int) -> Path:
    """The log of a host's launcher, with the lines of all its ranks."""
    return spec.logs / ("launcher.log" if spec.num_hosts == 1 else f"launcher-host{host}.log")


class ProcessesJob(RunningJob):
    """One launcher a host, as children of this process."""

    def __init__(
        self,
        spec: JobSpec,
        commands: Sequence[HostCommand],
        *,
        ends_with_parent: bool,
        lock: int,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(spec)
        self._give_back = close
        self._failed_first: int | None = None
        self._stop_at_s: float | None = None
        self._kill_at_s: float | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for host, command in enumerate(commands):
                self._processes.append(
                    _started(spec, host, command, ends_with_parent=ends_with_parent, lock=lock)
                )
        except OSError as error:
            self._kill_all()
            raise LaunchError(
                f"the launcher of {spec.name} cannot be started: {error.strerror} ({error.filename})."
            ) from error

    def _has_ended(self) -> bool:
        codes = [process.poll() for process in self._processes]
        if self._failed_first is None and any(codes):
            self._failed_first = next(host for host, code in enumerate(codes) if code)
            self._stop_at_s = time.monotonic() + _NOTICE_S
        if None not in codes:
            return True
        if self._stop_at_s is not None and time.monotonic() > self._stop_at_s:
            self._stop_at_s = None
            self._ask_to_stop()
            failed = self._processes[self._failed_first or 0].returncode
            if failed != SAVED_AND_REQUEUE:  # then the others are saving as well
                self._kill_at_s = time.monotonic() + _NOTICE_S
        if self._kill_at_s is not None and time.monotonic() > self._kill_at_s:
            self._kill_all()
        return False

    def _ask_to_stop(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
        self._kill_at_s = self._kill_at_s or time.monotonic() + _END_S

    def _kill_all(self) -> None:
        for process in self._processes:
            kill_group(process.pid)
            process.wait()

    def _outcome(self) -> Outcome:
        code = 0 if self._failed_first is None else self._processes[self._failed_first].returncode
        return outcome_of_exits(
            self.spec, otherwise=code if code >= 0 else 128 - code, log_files=self._log_files()
        )

    def _log_files(self) -> Sequence[Path]:
        return [launcher_log(self.spec, host) for host in range(len(self._processes))]

    def _close(self) -> None:
        self._give_back()


def _started(
    spec: JobSpec, host: int, command: HostCommand, *, ends_with_parent: bool, lock: int
) -> "subprocess.Popen[bytes]":
    own_pid = os.getpid()
    with launcher_log(spec, host).open("wb") as log:
        return subprocess.Popen(
            command.words,
            env={**command.environ, EXITS_VARIABLE: str(exits_file(spec, host))},
            cwd=spec.source_dir,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[lock],
            start_new_session=True,  # Ctrl-C is passed on once, by `RunningJob.wait`
            preexec_fn=(lambda: die_with_parent(own_pid)) if ends_with_parent else None,
        )
