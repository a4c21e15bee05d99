"""The exit codes of ``shardwright``.

==== ==================================================================
0    done
1    no: plans differ; or any other error
2    usage: the command line, a setting, a file or a model cannot be used
3    no feasible plan
4    the environment: ranks could not be started, something is missing
5    a worker crashed
6    a hang was detected
7    a numeric fault: NaN or infinity
8    a checkpoint is corrupt
75   the state was saved; start the job again
128+ the launcher was ended by the signal of that number
==== ==================================================================
"""

from shardwright.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    InfeasiblePlanError,
    LaunchError,
    NonFiniteError,
    PeerTimeoutError,
    PlanError,
    ScheduleError,
    ShardwrightError,
    TraceError,
    UsageError,
)

OK = 0
FAILED = 1
USAGE = 2
NO_PLAN = 3
ENVIRONMENT = 4
HANG = 6
NON_FINITE = 7
CORRUPT = 8
SAVED = 75


def exit_code_of(error: ShardwrightError | type[ShardwrightError]) -> int:
    """The code with which a command ends on an error, and a run whose first failure it is.

    >>> from shardwright.errors import InfeasiblePlanError
    >>> exit_code_of(InfeasiblePlanError("it needs 80 GiB"))
    3
    """
    kind = error if isinstance(error, type) else type(error)
    if issubclass(kind, InfeasiblePlanError):
        return NO_PLAN
    if issubclass(kind, LaunchError):
        return ENVIRONMENT
    if issubclass(kind, PeerTimeoutError):
        return HANG
    if issubclass(kind, NonFiniteError):
        return NON_FINITE
    if issubclass(kind, CorruptCheckpointError):
        return CORRUPT
    if issubclass(kind, CheckpointError | ConfigError | PlanError | ScheduleError | TraceError | UsageError):
        return USAGE
    return FAILED
