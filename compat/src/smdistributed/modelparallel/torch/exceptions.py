"""Errors that scripts get from this package; the toolkit of training containers looks them up here."""

from shardwright.errors import ConfigError, ShardwrightError, UsageError
from smdistributed.modelparallel.backend.exceptions import NotInitializedError

__all__ = ["ConfigError", "NotInitializedError", "NotThereYetError", "ShardwrightError", "UsageError"]


class NotThereYetError(UsageError, NotImplementedError):
    """A script asks for a part of the library that this version does not have."""
