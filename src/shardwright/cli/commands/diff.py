"""``shardwright diff``: two plans compared; the same as ``shardwright plan diff``."""

from shardwright.cli.commands.plan import diff

__all__ = ["diff"]
