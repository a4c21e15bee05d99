"""Tells from the code that runs whether a list is looked up to put an item into it: ``self.heads[i] = x``.

::

    LOAD_FAST   x
    LOAD_FAST   self
    LOAD_ATTR   heads      <- here: the list is on top of the stack
    LOAD_FAST   i             one above it
    STORE_SUBSCR              takes both, and x: nobody else has seen the list
"""

import dis
import functools
from types import CodeType, FrameType

__all__ = ["stores_item"]

# How many values an instruction takes from the stack, and puts there.
_EFFECTS = {
    **dict.fromkeys("LOAD_FAST LOAD_CONST LOAD_SMALL_INT LOAD_NAME LOAD_DEREF".split(), (0, 1)),
    **dict.fromkeys("LOAD_FAST_BORROW LOAD_FAST_CHECK LOAD_GLOBAL".split(), (0, 1)),
    **dict.fromkeys("LOAD_FAST_LOAD_FAST LOAD_FAST_BORROW_LOAD_FAST_BORROW".split(), (0, 2)),
    **dict.fromkeys("LOAD_ATTR UNARY_NEGATIVE UNARY_INVERT".split(), (1, 1)),
    **dict.fromkeys("BINARY_OP BINARY_SUBSCR".split(), (2, 1)),
    **dict.fromkeys("CACHE EXTENDED_ARG NOP RESUME".split(), (0, 0)),
}


def stores_item(frame: FrameType) -> bool:
    """Whether the attribute that a frame is looking up is only used to put an item into it."""
    return frame.f_lasti in _lookups_for_stores(frame.f_code)


@functools.lru_cache(maxsize=1024)
def _lookups_for_stores(code: CodeType) -> frozenset[int]:
    """Offsets of instructions that look an attribute up, of code that does no more with it than that."""
    steps = list(dis.get_instructions(code))
    found = (n for n, step in enumerate(steps) if step.opname == "LOAD_ATTR")
    return frozenset(steps[n].offset for n in found if _is_stored_into(steps[n + 1 :]))


def _is_stored_into(steps: list[dis.Instruction]) -> bool:
    """Whether what is on top of the stack is the container of the first ``STORE_SUBSCR`` that takes it."""
    above = 0
    for step in steps:
        if step.opname == "STORE_SUBSCR":
            return above == 1
        taken, put = _EFFECTS.get(step.opname, (above + 1, 0))
        if taken > above:
            return False
        above += put - taken
    return False
