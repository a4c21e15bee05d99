"""The errors that Shardwright raises on purpose.

::

    ShardwrightError
    ├── ConfigError            (ValueError)    a setting is unknown, out of range or contradicts another
    ├── PlanError              (ValueError)    a plan cannot be made, read or used
    │   ├── InfeasiblePlanError                nothing that the constraints allow fits
    │   └── StalePlanError                     the plan was made for another model, world or version
    ├── ScheduleError          (ValueError)    a schedule is incomplete, out of order or would deadlock
    ├── UsageError             (RuntimeError)  a call came at the wrong time or in the wrong place
    ├── TraceError             (RuntimeError)  the step function cannot be traced
    │   ├── DeferredReadError                  it reads a value that this rank does not hold
    │   └── TraceMismatchError                 ranks, or microbatches, took different paths through the model
    ├── PeerLostError          (RuntimeError)  another rank died, hung or closed its connection
    │   └── PeerTimeoutError                   it did not answer in time
    ├── NonFiniteError         (RuntimeError)  a loss or a gradient is infinite, or no number
    ├── CheckpointError        (RuntimeError)  a checkpoint cannot be saved, found or used here
    │   └── CorruptCheckpointError             it is damaged, incomplete, or not what was committed
    └── LaunchError            (RuntimeError)  workers could not be started, or one of them failed

Each message says what was asked, what is true (with numbers), and what to do.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from shardwright.text import printable

__all__ = [
    "CheckpointError",
    "ConfigError",
    "CorruptCheckpointError",
    "DeferredReadError",
    "InfeasiblePlanError",
    "LaunchError",
    "NonFiniteError",
    "PeerLostError",
    "PeerTimeoutError",
    "PlanError",
    "ScheduleError",
    "ShardwrightError",
    "StalePlanError",
    "TraceError",
    "TraceMismatchError",
    "UsageError",
    "library_named",
]


# What scripts may know under the name of another library, too.
_SHARED_NAMES = (
    "DistributedModel DistributedOptimizer barrier delay_param_initialization init partition rank "
    "set_activation_checkpointing set_partition shutdown step"
).split()
_OUR_NAME = re.compile(rf"\bsw\.(?=(?:{'|'.join(_SHARED_NAMES)})\b)")


class ShardwrightError(Exception):
    """Base of every error in this tree.

    Attributes:
        library: the name by which the script knows the library, for messages.
    """

    library: ClassVar[str] = "sw"

    def __str__(self) -> str:
        # Escaped here, for a script's error goes to the console without passing through anything of ours.
        return printable(_OUR_NAME.sub(f"{self.library}.", super().__str__()), lines=True)


@contextmanager
def library_named(name: str) -> Iterator[None]:
    """Makes errors say ``smp.step`` instead of ``sw.step`` inside, for scripts with that name only."""
    before, ShardwrightError.library = ShardwrightError.library, name
    try:
        yield
    finally:
        ShardwrightError.library = before


class ConfigError(ShardwrightError, ValueError):
    """A setting is unknown, out of range or contradicts another."""


class PlanError(ShardwrightError, ValueError):
    """A plan cannot be made, read or used."""


class InfeasiblePlanError(PlanError):
    """Nothing that the constraints allow fits the machines."""


class StalePlanError(PlanError):
    """A plan was made for another model, another number of ranks or another format version."""


class ScheduleError(ShardwrightError, ValueError):
    """A schedule is incomplete, out of order or would deadlock."""


class UsageError(ShardwrightError, RuntimeError):
    """A call came at the wrong time or in the wrong place."""


class TraceError(ShardwrightError, RuntimeError):
    """The step function or the model cannot be traced."""


class DeferredReadError(TraceError):
    """Python code reads the value of a tensor that lives on another rank.

    Attributes:
        inside: the modules being called where it happened, outermost first.
        buffers: names of buffers that the value rests on, which the step function changes.
    """

    inside: tuple[object, ...] = ()
    buffers: frozenset[str] = frozenset()


class TraceMismatchError(TraceError):
    """Two ranks, or two microbatches, took different paths through the model."""


class PeerLostError(ShardwrightError, RuntimeError):
    """Another rank died, hung or closed its connection.

    Attributes:
        rank: world rank of the peer; None where it is not known.
    """

    def __init__(self, message: str, *, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


class PeerTimeoutError(PeerLostError):
    """Another rank did not answer in time: it hangs, or is elsewhere in the script."""


class NonFiniteError(ShardwrightError, RuntimeError):
    """A loss or a gradient of a training step is infinite, or no number; no update was made of it."""


class CheckpointError(ShardwrightError, RuntimeError):
    """A checkpoint cannot be saved, found or used here."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint is damaged, incomplete, or not what was committed."""


class LaunchError(ShardwrightError, RuntimeError):
    """Workers could not be started, or one of them failed.

    Attributes:
        exit_code: with which the run ended, where one was started; see `shardwright.exit_codes`.
    """

    def __init__(self, message: str, *, exit_code: int | None = None):
        super().__init__(message)
        self.exit_code = exit_code
