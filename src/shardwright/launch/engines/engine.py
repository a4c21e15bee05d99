"""What engines share: their interface, a job's run folder, its launchers, lines for a shell.

The launchers of a job inherit the lock of its folder. So it lasts as long as any of them, even if the process
that started them has ended, and no longer.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shardwright.errors import ConfigError, LaunchError
from shardwright.launch.job_spec import JobSpec
from shardwright.launch.processes import EXITS_VARIABLE, SAVED_AND_REQUEUE, die_with_parent, kill_group
from shardwright.launch.running_job import Outcome, RunningJob, exits_file, outcome_of_exits


class Engine(Protocol):
    """Starts training jobs somewhere.

    Attributes:
        is_here: jobs run on this machine, so that its GPUs count.
        sees_files: ranks see the files of this machine under the same paths.
    """

    is_here: bool
    sees_files: bool

    def manifest(self, spec: JobSpec) -> str:
        """The text of what `start` runs or submits."""
        ...

    def start(self, spec: JobSpec, *, waits: bool) -> RunningJob: ...


log = logging.getLogger(__name__)

_LOCK = ".job.lock"


@contextmanager
def prepared_run_folder(spec: JobSpec) -> Iterator[int]:
    """Makes the folder of a job, without leftovers of an earlier job of its name."""
    try:
        spec.logs.mkdir(parents=True, exist_ok=True)
        lock = os.open(spec.run_folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise _not_made(spec, error) from error
    try:
        try:
            _hold(lock, spec)
            for left in spec.logs.glob("exits-host*.jsonl"):
                left.unlink()
        except OSError as error:
            raise _not_made(spec, error) from error
        yield lock
    finally:
        os.close(lock)


def still_runs(spec: JobSpec, where: str = "") -> ConfigError:
    """The error for a job whose name a running job has."""
    known = f" ({where})" if where else ""
    return ConfigError(
        f"a training job {spec.name} goes on in {spec.runs_dir}{known}. Wait for its end to continue it, "
        "stop it, or give this one another job_name."
    )


def _hold(lock: int, spec: JobSpec) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise still_runs(spec) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        log.warning("%s cannot be locked (%s): nothing keeps other jobs out", spec.run_folder, error.strerror)


def _not_made(spec: JobSpec, error: OSError) -> LaunchError:
    return LaunchError(
        f"the folder {spec.run_folder} of the job cannot be made: {error.strerror}. Set output_path to "
        "a folder that can be written."
    )


_NOTICE_S = 5.0
"""Hosts whose peer has failed get so long to notice it and to say so, and as long again to end."""

_END_S = 45.0
"""Launchers that were told to end give their ranks 30 s, and need some themselves."""


@dataclass(frozen=True, slots=True)
class HostCommand:
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


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class ShellText(str):
    """Text that a shell is to read, such as ``"$SLURM_NODEID"``, where other words are taken as they are."""

    __slots__ = ()


def shell_line(words: Iterable[str]) -> str:
    """The words of a command for a shell.

    >>> shell_line(["run", "--node-rank", ShellText('"$1"'), "it's $HOME"])
    'run --node-rank "$1" \\'it\\'"\\'"\\'s $HOME\\''
    """
    return " ".join(word if isinstance(word, ShellText) else shlex.quote(word) for word in words)


def is_variable(name: str) -> bool:
    """Whether a shell can have a variable of this name; ``SM_HP_LEARNING-RATE`` is none."""
    return _VARIABLE.fullmatch(name) is not None
