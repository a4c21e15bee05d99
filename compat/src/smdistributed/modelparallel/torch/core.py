"""``smp.core``: ranks, groups and barriers, where older scripts look for them."""

from smdistributed.modelparallel import comm, groups
from smdistributed.modelparallel.comm import *  # noqa: F403
from smdistributed.modelparallel.groups import *  # noqa: F403
from smdistributed.modelparallel.torch.initialization import init, is_initialized

__all__ = ["init", "is_initialized", *comm.__all__, *groups.__all__]
