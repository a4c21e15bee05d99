"""The run folder of a training job, used by one job at a time.

The launchers of a job inherit the lock of its folder. So it lasts as long as any of them, even if the process
that started them has ended, and no longer.
"""

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from shardwright.errors import ConfigError, LaunchError
from shardwright.launch.jobs.job_spec import JobSpec

__all__ = ["prepared_run_folder", "still_runs"]

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
