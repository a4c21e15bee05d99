"""A started training job: wait for it, stop it, ask how it ended."""

import contextlib
import json
import signal
import sys
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from shardwright.errors import LaunchError
from shardwright.launch.job_spec import JobSpec
from shardwright.launch.processes import SAVED_AND_REQUEUE, ExitLog, WorkerExit
from shardwright.launch.ranks.verdict import exit_code, failure_report
from shardwright.text import printable

Status = Literal["InProgress", "Stopping", "Completed", "Failed", "Stopped"]
Outcome = tuple[int, str]
"""An exit code, and what there is to say about it."""

_POLL_S = 0.1
_LAST_LINES = 15


class _LogTail:
    """Shows what is added to log files, from several hosts as it comes."""

    def __init__(self, files: Callable[[], Sequence[Path]], show: Callable[[str], None]) -> None:
        self._files = files
        self._show = show
        self._read: dict[Path, int] = {}

    def copy(self, *, to_the_end: bool = False) -> None:
        """Shows what is new; a last line without an end only `to_the_end`."""
        for path in self._files():
            try:
                with path.open("rb") as file:
                    file.seek(self._read.get(path, 0))
                    data = file.read()
            except FileNotFoundError:
                continue
            whole = len(data) if to_the_end else data.rfind(b"\n") + 1
            if whole:
                self._read[path] = self._read.get(path, 0) + whole
                self._show(data[:whole].decode(errors="replace"))


@contextlib.contextmanager
def _ctrl_c_collected() -> Iterator[list[int]]:
    """Collects each Ctrl-C, instead of an error in the midst of whatever goes on."""
    interrupts: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield interrupts  # Python interrupts no other
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


class RunningJob(ABC):
    """A training job that was started. Engines say how to ask for its state and how to end it.

    Attributes:
        exit_code: how it ended (see `shardwright.exit_codes`); None while it runs.
    """

    poll_s = _POLL_S

    def __init__(self, spec: JobSpec, *, is_limited: bool = False, asks_every_s: float = 0.0) -> None:
        self.spec = spec
        self.exit_code: int | None = None
        self.failure: str = ""
        self._is_stopped = False
        self._over_time = False
        self._is_shown = False
        self._asks_every_s = asks_every_s
        self._asks_next_s = 0.0
        self._deadline_s: float | None = None
        if spec.max_run_s is not None and not is_limited:
            self._deadline_s = time.monotonic() + spec.max_run_s

    @property
    def name(self) -> str:
        return self.spec.name

    job_name = name

    @property
    def run_folder(self) -> Path:
        """The folder of its logs and results."""
        return self.spec.run_folder

    @property
    def status(self) -> Status:
        """SageMaker's TrainingJobStatus."""
        self._look()
        if self.exit_code is None:
            return "Stopping" if self._is_stopped else "InProgress"
        if self.exit_code == 0:
            return "Completed"
        return "Stopped" if self._is_stopped and not self._over_time else "Failed"

    def describe(self) -> dict[str, Any]:
        """The known part of SageMaker's ``describe_training_job``."""
        status = self.status
        found = {
            "TrainingJobName": self.name,
            "TrainingJobStatus": status,
            "ModelArtifacts": {"S3ModelArtifacts": str(self.run_folder / "model")},
            "HyperParameters": {k: json.dumps(v) for k, v in self.spec.hyperparameters.items()},
            "ResourceConfig": {
                "InstanceType": self.spec.instance_type,
                "InstanceCount": self.spec.num_hosts,
            },
        }
        return {**found, "FailureReason": self.failure} if status == "Failed" else found

    def stop(self) -> None:
        """Asks the ranks to save and end; `wait` returns when they have."""
        if self.exit_code is None:
            self._is_stopped = True
            self._ask_to_stop()
            self._asks_next_s = 0.0

    def wait(self, logs: bool = True) -> None:
        """Waits for the end of the job.

        Ctrl-C is passed on to the ranks, which have time to save; a second one is immediate.
        """
        tail = _LogTail(self._log_files, self._show if logs else lambda text: None)
        self._is_shown = logs
        num_passed_on = 0
        with _ctrl_c_collected() as interrupts:
            while self.exit_code is None:
                if num_passed_on < len(interrupts):
                    num_passed_on += 1
                    self.stop()
                tail.copy()
                self._look()
                time.sleep(self.poll_s if self.exit_code is None else 0.0)
        tail.copy(to_the_end=True)
        if interrupts:
            raise KeyboardInterrupt
        self._raise_if_failed()

    def _show(self, text: str) -> None:
        """Shows whole lines of the log."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def _note(self, text: str) -> None:
        """Tells one who waits what the job waits for."""
        if self._is_shown:
            sys.stderr.write(f"shardwright: {printable(text, lines=True)}\n")
            sys.stderr.flush()

    def _look(self) -> None:
        if self.exit_code is not None:
            return
        if self._deadline_s is not None and time.monotonic() > self._deadline_s and not self._is_stopped:
            self._over_time = True
            self.stop()
        if time.monotonic() < self._asks_next_s:
            return
        self._asks_next_s = time.monotonic() + self._asks_every_s
        if self._has_ended():
            self.exit_code, self.failure = self._outcome()
            self._close()

    def _raise_if_failed(self) -> None:
        if self.exit_code == 0:
            return
        if self._over_time:
            self.failure = (
                f"max_run is {self.spec.max_run_s:g} s, and they are over, so that the job was stopped. "
                f"Give it more, or None for no limit.\n{self.failure}"
            )
        elif self._is_stopped:
            warnings.warn(f"training job {self.name} was stopped before its end", stacklevel=3)
            return
        what = (
            "saved its state and asks to be started again, under the same job_name"
            if self.exit_code == SAVED_AND_REQUEUE
            else "failed"
        )
        raise LaunchError(
            f"training job {self.name} {what} (exit code {self.exit_code}). {self.failure}".rstrip()
            + f"\nlogs: {self.spec.logs}",
            exit_code=self.exit_code,
        )

    @abstractmethod
    def _has_ended(self) -> bool:
        """Whether it has ended; called every `asks_every_s`."""

    @abstractmethod
    def _ask_to_stop(self) -> None:
        """Asks the ranks to save and end; called again after a second Ctrl-C."""

    @abstractmethod
    def _outcome(self) -> Outcome:
        """The outcome; called once."""

    @abstractmethod
    def _log_files(self) -> Sequence[Path]:
        """The log files to show."""

    def _close(self) -> None:  # noqa: B027  (most jobs have nothing to give back)
        """Gives back what the job had; called once, after its end."""


def exits_file(spec: JobSpec, host: int | str) -> Path:
    """The file in which the launcher of a host reports how its ranks ended."""
    return spec.logs / f"exits-host{host}.jsonl"


def outcome_of_exits(spec: JobSpec, *, otherwise: int, log_files: Sequence[Path] = ()) -> Outcome:
    """The outcome of a job, by the reports of its hosts' launchers."""
    exits: list[WorkerExit] = []
    for path in sorted(spec.logs.glob("exits-host*.jsonl")):
        exits += ExitLog(path).read()
    if any(worker_exit.exit_code for worker_exit in exits):
        return exit_code(exits), failure_report(exits)
    if otherwise == 0:
        return 0, ""
    said = "\n".join(_last_lines(path) for path in log_files).strip()
    return otherwise, f"its launcher wrote:\n{said}" if said else "its launcher wrote nothing."


def _last_lines(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(lines[-_LAST_LINES:])
