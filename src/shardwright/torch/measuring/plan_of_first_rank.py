"""All ranks take the plan of the first one."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from shardwright.plan import Plan
from shardwright.run.context import Context

__all__ = ["plan_of_first_rank"]


def plan_of_first_rank(context: Context, plan: Callable[[], Plan], *, on_all: bool) -> Plan:
    """The first rank's plan; collective over all ranks.

    Args:
        context: the run.
        plan: makes it.
        on_all: all ranks make one, as they time parts of units: they will compute at the same time.

    Raises:
        ShardwrightError: what `plan` raised on the first rank.
    """
    if on_all and context.rank > 0:
        with suppress(Exception), _unsaid():  # that of the first rank counts, its error and what it says
            plan()
    return context.from_first_rank(plan)


@contextmanager
def _unsaid() -> Iterator[None]:
    """Inside, the library warns of nothing: the first rank says the same."""
    logger = logging.getLogger("shardwright")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
