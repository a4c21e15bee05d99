"""The folder in which a run leaves its files, and the lock that keeps a second run out.

The kernel releases this file lock when the process ends, however it ends: nothing is left to clean up by
hand. A child does not inherit it.

::

    runs/train/        after the script: train-2, train-3 where that is taken
      run.json         the command, and how the run ended
      config.json      the settings in force
      plan.json        the plan in force
      metrics.jsonl    one line a step
      events.jsonl     one line for each thing that happened
      steps.json       two steps, with the times of all actions
      trace.json       a timeline, for Perfetto
      report.html      all of it on one page; written at the end
      logs/            what each rank printed; the launcher writes it

All ranks of a job share one folder: the first rank makes it, and the caller sends its path to the others. The
launcher and the first rank each hold a lock in it, so that two runs of one name do not mix.
"""

import atexit
import errno
import fcntl
import itertools
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Literal

from shardwright.errors import ConfigError
from shardwright.files import is_left_by_another, open_to_append, replace_file
from shardwright.text import control_in, printable, shown

log = logging.getLogger(__name__)

_HELD: dict[Path, IO[bytes]] = {}
_LONGEST_HOLDER = 300


def hold(path: Path) -> str | None:
    """Holds a lock file until this process ends."""
    if path in _HELD:
        return None
    file = open_to_append(path)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            log.warning("%s cannot be locked (%s): nothing keeps other runs out", path, error.strerror)
            _HELD[path] = file
            return None
        file.seek(0)
        holder = printable(file.read(_LONGEST_HOLDER).decode(errors="replace").strip())
        file.close()
        return holder or "another process"
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
    file.flush()
    _HELD[path] = file
    return None


def release(path: Path) -> None:
    """Lets others hold a lock file; nothing where this process does not hold it."""
    file = _HELD.pop(path, None)
    if file is not None:
        file.close()


@contextmanager
def held(path: Path) -> Iterator[str | None]:
    """Holds a lock file for a while; one that this process has held before, it goes on holding."""
    goes_on = path in _HELD
    holder = hold(path)
    try:
        yield holder
    finally:
        if holder is None and not goes_on:
            release(path)


@atexit.register
def _close() -> None:
    """Closes the files, which Python would otherwise complain about."""
    while _HELD:
        _HELD.popitem()[1].close()


_VARIABLE = "SHARDWRIGHT_RUN_DIR"
_LOGS = "logs"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths inside a run folder; to make one, use `create`."""

    path: Path

    @classmethod
    def create(
        cls,
        base: str | os.PathLike[str],
        *,
        name: str | None = None,
        stem: str | None = None,
        environ: Mapping[str, str] = os.environ,
        now: Callable[[], datetime] = datetime.now,
    ) -> "RunFolder":
        """Makes the folder of a run, or takes the one that the launcher made; for the first rank only.

        The contract with launchers: where ``SHARDWRIGHT_RUN_DIR`` names a folder that holds ``logs/``, that
        folder *is* the run folder, and `base` and `name` are not looked at. Otherwise the run folder is made
        inside the folder that it names, or inside `base`.

        A run with a given name that is there already is continued in its folder: a job that was requeued
        appends to its own metrics. A folder named after a stem, or the time, is always a new one.
        """
        launched = launched_folder(environ)
        if launched is not None:
            return launched
        if name is not None:
            check_name(name)
        base = runs_dir(base, environ)
        try:
            path = _make(Path(base).absolute(), name, stem or now().strftime("%Y-%m-%d_%H-%M-%S"))
            (path / _LOGS).mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"a run folder cannot be made in run_dir {shown(os.fspath(base))}: {error.strerror}. "
                "Set run_dir to a folder that can be written."
            ) from error
        return cls(path)

    def hold(self, part: Literal["logs", "metrics"]) -> None:
        """Makes this process the only one that writes a part of the folder, until it ends."""
        holder = hold(self.path / f".{part}.lock")
        if holder is not None:
            raise ConfigError(
                f"the run folder {self} belongs to another run that goes on ({holder}). Wait until that has "
                "ended to continue it, or give this run another name, or none."
            )

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events_file(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def steps_file(self) -> Path:
        return self.path / "steps.json"

    @property
    def trace_file(self) -> Path:
        return self.path / "trace.json"

    @property
    def report_file(self) -> Path:
        return self.path / "report.html"

    @property
    def logs_dir(self) -> Path:
        return self.path / _LOGS

    @property
    def tensorboard_dir(self) -> Path:
        return self.path / "tensorboard"

    def write(self, name: str, text: str) -> Path:
        """Writes a file of this folder, whole or not at all; returns its path."""
        path = self.path / name
        replace_file(path, text, follows=False)
        return path

    def __str__(self) -> str:
        return show_path(self.path)


def show_path(path: Path) -> str:
    """A path for a person: relative to the working directory where it lies inside."""
    here = Path.cwd()
    return printable(str(path.relative_to(here) if path.is_relative_to(here) else path))


def launched_folder(environ: Mapping[str, str] = os.environ) -> RunFolder | None:
    """The run folder that ``shardwright run`` has made for this process; None where it has not."""
    launched = environ.get(_VARIABLE)
    if (control := control_in(launched or "")) is not None:
        raise ConfigError(
            f"{_VARIABLE} is {shown(launched)}, but it must not have control characters such as {control}."
        )
    return RunFolder(Path(launched).absolute()) if launched and Path(launched, _LOGS).is_dir() else None


def runs_dir(base: str | os.PathLike[str], environ: Mapping[str, str] = os.environ) -> Path:
    """The folder that holds the run folders: the one that a launcher names, or else `base`."""
    return Path(environ.get(_VARIABLE) or base)


def free_name(base: Path, stem: str) -> str:
    return next(name for name in _names(stem) if not (base / name).exists())


def is_name(name: str) -> bool:
    marks = (mark for mark in ("/", os.sep, "\0") if mark in name)
    return name not in ("", ".", "..") and not any(marks) and control_in(name) is None


def check_name(name: str) -> None:
    if not is_name(name):
        raise ConfigError(
            f"run_name is {shown(name)}, but it must be the name of one folder, such as first-try. "
            "Set run_dir to choose where that folder lies."
        )


def _make(base: Path, name: str | None, stem: str) -> Path:
    base.mkdir(parents=True, exist_ok=True)
    if name is not None:
        path = base / name
        path.mkdir(exist_ok=True)
        if is_left_by_another(path):
            raise ConfigError(
                f"the run folder {show_path(path)} is another user's, in a folder for all: its files could "
                "lead anywhere. Give this run another name, or set run_dir to a folder of your own."
            )
        return path
    for path_name in _names(stem):
        # mkdir, not exists() and mkdir: of two runs that start at the same time, one must lose here.
        with suppress(FileExistsError):
            (base / path_name).mkdir()
            break
    return base / path_name


def _names(stem: str) -> Iterator[str]:
    yield stem
    yield from (f"{stem}-{number}" for number in itertools.count(2))
