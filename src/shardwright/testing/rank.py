"""The life of a forked rank, and the gate that ranks pass together."""

import faulthandler
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle

from shardwright.comm.codec import encode
from shardwright.comm.joining.run_secret import Seal, packed, unpacked
from shardwright.launch.processes import die_with_parent
from shardwright.testing.job import PAYLOAD, Job, RankFiles, RankReport, value_place


class Gate:
    """Holds ranks until all that still live have arrived.

    ::

        rank                          server
        (1) writes its number ------> collects numbers
        (2) reads, hence waits        (3) closes its end when the rest has arrived or died: all reads return
    """

    def __init__(self) -> None:
        self._arrivals_fd, self._arrivals_write_fd = os.pipe()
        self._release_read_fd, self._release_fd = os.pipe()
        self.arrived: set[int] = set()
        self.is_open = False

    @classmethod
    def of_rank(cls, arrivals_write_fd: int, release_read_fd: int) -> "Gate":
        """In a rank that was forked from elsewhere: the gate with these `rank_ends`."""
        gate = cls.__new__(cls)
        gate._arrivals_write_fd, gate._release_read_fd = arrivals_write_fd, release_read_fd
        return gate

    @property
    def rank_ends(self) -> tuple[int, int]:
        return self._arrivals_write_fd, self._release_read_fd

    @property
    def arrivals_fd(self) -> int:
        """Readable when a rank has arrived."""
        return self._arrivals_fd

    def keep_server_ends(self) -> None:
        """In the server, once all ranks are forked."""
        os.close(self._arrivals_write_fd)
        os.close(self._release_read_fd)

    def keep_rank_ends(self) -> None:
        """In a rank, first of all: a rank that held the server's end could never be released."""
        os.close(self._arrivals_fd)
        os.close(self._release_fd)

    def cross(self, rank: int) -> None:
        """In a rank: arrives and waits for the others."""
        os.write(self._arrivals_write_fd, bytes([rank]))  # (1)
        os.read(self._release_read_fd, 1)  # (2)

    def collect(self) -> None:
        """In the server: notes who has arrived; to be called when `arrivals_fd` is readable."""
        self.arrived.update(os.read(self._arrivals_fd, 4096))

    def open_if_complete(self, *, num_ranks: int, ended: Iterable[int]) -> None:
        """In the server: lets all pass once nobody else can come."""
        if not self.is_open and len(self.arrived.union(ended)) == num_ranks:
            os.close(self._release_fd)  # (3)
            self.is_open = True

    def close(self) -> None:
        """In the server: frees the rest."""
        os.close(self._arrivals_fd)
        if not self.is_open:
            os.close(self._release_fd)
            self.is_open = True


STACKS_SIGNAL = signal.SIGQUIT
"""Makes a rank write its Python stacks, even while it waits in C++ or holds the interpreter lock."""


def run_rank(job: Job, rank: int, *, server_pid: int, start: Gate, finish: Gate) -> NoReturn:
    """Runs the job's function as one rank, and ends the process."""
    exit_code = 1
    try:
        files = RankFiles(Path(job.folder), rank)
        _settle(job, rank, files=files, server_pid=server_pid)
        report = _call(job, rank, start=start)
        _write(files.report, report)
        if report.error is None:
            finish.cross(rank)
            _leave_group()
        exit_code = report.exit_code
    except BaseException:
        traceback.print_exc()
    finally:
        _flush()
        # Without interpreter shutdown: threads of gloo or of the user could hang it, and the answer is
        # written.
        os._exit(exit_code)


def _settle(job: Job, rank: int, *, files: RankFiles, server_pid: int) -> None:
    die_with_parent(server_pid)
    for number in (signal.SIGCHLD, signal.SIGTERM, STACKS_SIGNAL):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for path, stream, descriptor in ((files.stdout, sys.stdout, 1), (files.stderr, sys.stderr, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    stacks = os.open(files.stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.enable(file=2)
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    os.environ.clear()
    os.environ.update(job.environ[rank])
    os.chdir(job.working_folder)
    sys.path[:] = job.search_path


def _call(job: Job, rank: int, *, start: Gate) -> RankReport:
    try:
        value = _run(job, rank, start=start)
        at_s = time.monotonic()
        _tell_others(None)
        packed_value = packed(value, job.seal, value_place(rank), dumps=cloudpickle.dumps)
        return RankReport(at_s=at_s, value=packed_value)
    except (
        BaseException
    ) as error:  # SystemExit and KeyboardInterrupt too: whatever ends a rank early is a failure
        at_s = time.monotonic()
        _tell_others(error)
        return RankReport(
            at_s=at_s,
            error="".join(traceback.format_exception(_without_our_frames(error))).rstrip(),
            error_type=type(error).__qualname__,
            error_line=_first_line(error),
            exception=_packed_or_none(error, job.seal, value_place(rank)),
            exit_code=_exit_code(error),
        )


def _run(job: Job, rank: int, *, start: Gate) -> Any:
    import torch

    torch.set_num_threads(1)
    if job.init_process_group:
        _join_group(job, rank)
    function, args, kwargs, filters = unpacked(job.payload, job.seal, PAYLOAD)
    start.cross(rank)
    with warnings.catch_warnings():
        warnings.filters[:] = filters  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]
        return function(*args, **kwargs)


def _tell_others(error: BaseException | None) -> None:
    """Says to ranks that wait for this one that its function has ended, as the interpreter's end would."""
    roll_call = sys.modules.get("shardwright.run.joint_calls")
    if roll_call is not None:
        roll_call.script_ended(error)


def _join_group(job: Job, rank: int) -> None:
    import torch.distributed as dist

    # A file, and not the TCP store: each TCP connection asks the name server for the peer's name, and
    # where that one drops packets a call takes 5 s longer.
    path = os.path.join(job.folder, "store")
    store = dist.FileStore(path, job.num_ranks)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=job.group_timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.num_ranks, timeout=timeout)


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _without_our_frames(error: BaseException) -> BaseException:
    """Drops the leading frames of this file from a traceback: they say nothing about the user's function."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    return error.with_traceback(frame)


def _first_line(error: BaseException) -> str:
    """Class and message, without the source lines of a SyntaxError before and the notes after."""
    lines = [line for part in traceback.format_exception_only(error) for line in part.splitlines()]
    return next((line for line in lines if not line.startswith(" ")), type(error).__qualname__)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return (error.code or 0) & 0xFF
    return 1


def _packed_or_none(error: BaseException, seal: Seal, place: str) -> bytes | None:
    try:
        pickled = packed(error, seal, place, dumps=cloudpickle.dumps)
        unpacked(pickled, seal, place)
    except Exception:  # an exception class with required arguments, say; its text still travels
        return None
    return pickled


def _write(path: Path, report: RankReport) -> None:
    """Writes at a stroke, so that a rank killed in between leaves no half report."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(encode(report))
    partial.replace(path)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # the function closed it
            continue
