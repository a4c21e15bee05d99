"""``shardwright ckpt``: lists, verifies, recovers, exports, imports and clears checkpoints."""

from shardwright.cli.commands.ckpt.application import application

__all__ = ["application"]
