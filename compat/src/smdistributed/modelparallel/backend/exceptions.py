"""Errors between ranks; the toolkit of training containers looks them up here to tell what went wrong."""

from shardwright.errors import (
    CheckpointError,
    ConfigError,
    LaunchError,
    PeerLostError,
    PeerTimeoutError,
    ShardwrightError,
    UsageError,
)

__all__ = [
    "CheckpointError",
    "ConfigError",
    "LaunchError",
    "NotInitializedError",
    "PeerLostError",
    "PeerTimeoutError",
    "ShardwrightError",
    "UsageError",
]


class NotInitializedError(UsageError):
    """A script uses the library before it calls ``smp.init``."""
