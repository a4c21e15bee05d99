"""The client side of the fork server."""

import atexit
import contextlib
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import shardwright
from shardwright.errors import LaunchError
from shardwright.testing.job import Job, RankStatus, receive, send
from shardwright.testing.nursery import hash_seeds

_SERVER_START_S = 180.0
_SERVER_END_S = 10.0
_MARGIN_S = 30.0
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class _ForkServerClient:
    """Starts a fork server for the first job, and hands it one job at a time.

    Attributes:
        preload: modules that the server imports before it forks.
        hash_seed: ``PYTHONHASHSEED`` of the server; ranks of its nursery have the next one.
    """

    def __init__(self) -> None:
        self.preload: list[str] = []
        self.hash_seed = _hash_seed()
        self._lock = threading.Lock()
        self._owner_pid = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._log: IO[bytes] | None = None
        atexit.register(self.close)

    @property
    def server_pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def run(self, job: Job) -> list[RankStatus]:
        """Runs a job and returns one status a rank."""
        with self._lock, self._closing_on_failure():
            if self.server_pid is None:
                self.close()
                self._start()
            assert self._channel is not None
            send(self._channel, job)
            if not select.select([self._channel], [], [], _SERVER_START_S + job.timeout_s + _MARGIN_S)[0]:
                raise LaunchError(
                    f"The fork server (process {self.server_pid}) does not answer. {self._log_text()}"
                )
            answer = receive(self._channel)
            if isinstance(answer, str):
                raise LaunchError(f"The fork server could not run the job:\n{answer}")
            statuses: list[RankStatus] = answer
            return statuses

    @contextlib.contextmanager
    def _closing_on_failure(self) -> Iterator[None]:
        """Ends the server and its ranks whatever goes wrong, Ctrl-C included; the next job starts afresh."""
        try:
            yield
        except (EOFError, OSError) as error:
            code = self._wait_for_end()
            log = self._log_text()
            self.close()
            raise LaunchError(f"The fork server ended before it answered, with {code}. {log}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the server, the ranks and the store, and waits until they are gone."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if os.getpid() == self._owner_pid:
            self._wait_for_end()
        self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def _wait_for_end(self) -> int | None:
        if self._process is None:
            return None
        try:
            return self._process.wait(_SERVER_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._channel = ours
        seed, other_seed = hash_seeds(self.hash_seed)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "shardwright.testing.fork_server"),
                    *("--channel-fd", str(theirs.fileno())),
                    *("--caller-pid", str(os.getpid())),
                    *("--hash-seed", str(other_seed)),
                ],
                env={**_server_environ(), "PYTHONHASHSEED": str(seed)},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,  # a Ctrl-C in the terminal goes to the caller alone, who then closes
            )

    def _log_text(self) -> str:
        if self._log is None:
            return ""
        self._log.seek(0)
        text = self._log.read().decode(errors="replace").strip()
        return f"It wrote:\n{text}" if text else "It wrote nothing."


def _hash_seed() -> int:
    """The seed that is asked for, or any."""
    asked = os.environ.get("PYTHONHASHSEED", "")
    return int(asked) if asked.isdecimal() else int.from_bytes(os.urandom(4), "little")


def _server_environ() -> dict[str, str]:
    """The caller's environment, without thread pools, and with shardwright as the caller found it."""
    environ = {"RES_OPTIONS": "timeout:1 attempts:1", **os.environ, **_ONE_THREAD}
    package_parent = Path(shardwright.__file__).parent.parent
    if package_parent.name not in ("site-packages", "dist-packages"):
        environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(package_parent), os.environ.get("PYTHONPATH")))
        )
    return environ


_CLIENTS: dict[int, _ForkServerClient] = {}


def this_process_client() -> _ForkServerClient:
    """The client of the calling process; a forked child gets its own: two cannot share a socket."""
    pid = os.getpid()
    if pid not in _CLIENTS:
        inherited = list(_CLIENTS.values())
        _CLIENTS.clear()
        for client in inherited:
            client.close()
        _CLIENTS[pid] = _ForkServerClient()
    return _CLIENTS[pid]


def preload(*modules: str) -> None:
    """Names modules that the fork server imports once, so that the ranks need not.

    For example in ``conftest.py``: ``shardwright.testing.preload("transformers")``. Nothing is imported
    before the first call of `run_ranks`.
    """
    known = this_process_client().preload
    known.extend(name for name in modules if name not in known)
