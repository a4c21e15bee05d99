"""Ranks start warm: see ``warm_up.py``."""

from shardwright.testing import preload

preload("warm_up")
