"""``shardwright plan``: makes a plan without running it, shows one, compares two."""

from shardwright.cli.commands.plan.application import application, diff

__all__ = ["application", "diff"]
