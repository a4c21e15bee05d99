"""The interface of an engine."""

from typing import Protocol

from shardwright.launch.jobs.job_spec import JobSpec
from shardwright.launch.jobs.running_job import RunningJob

__all__ = ["Engine"]


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
