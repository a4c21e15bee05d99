"""Ranks and groups, where older scripts look for them."""

from smdistributed.modelparallel import groups
from smdistributed.modelparallel.groups import *  # noqa: F403

__all__ = list(groups.__all__)
