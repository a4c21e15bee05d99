"""Errors that scripts get from this package; the toolkit of training containers looks them up here."""

from shardwright.errors import LaunchError, PeerLostError, PeerTimeoutError, ShardwrightError, UsageError

__all__ = ["LaunchError", "PeerLostError", "PeerTimeoutError", "ShardwrightError", "UsageError"]
