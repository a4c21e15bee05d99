"""``shardwright diff``: compares two plans; the same as ``shardwright plan diff``."""

from shardwright.cli.commands.plan import diff

__all__ = ["diff"]
