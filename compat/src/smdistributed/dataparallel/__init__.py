"""SageMaker's data parallel library (SMDDP), over Shardwright.

::

    import smdistributed.dataparallel.torch.torch_smddp             # makes the backend known
    torch.distributed.init_process_group("smddp")
"""

import itertools

__all__ = ["__version__"]

# The last release; scripts that compare it ask whether the backend is there, as it is since 1.4.
__version__ = "2.6.0"

_TASKS = itertools.count()


def _get_id_for_herring_task(*args: object, **kwargs: object) -> int:
    """The number of the next collective: 0, 1, 2, ...; tests of 1.3 and earlier name collectives by it."""
    return next(_TASKS)
