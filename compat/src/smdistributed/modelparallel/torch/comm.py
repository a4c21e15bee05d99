"""Objects from rank to rank, where older scripts look for them."""

from smdistributed.modelparallel import comm
from smdistributed.modelparallel.comm import *  # noqa: F403

__all__ = list(comm.__all__)
